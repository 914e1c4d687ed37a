// Package account holds tests only: what the accounting of a node costs a step, on every device, and that its ledgers tell the
// same. They need the engine and its ledgers and nothing of a node's network, so that their binary is small enough to travel to a card.
package account
