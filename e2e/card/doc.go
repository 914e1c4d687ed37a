// Package card holds run.sh, which runs all that is tested and measured on a card from binaries that were carried there, and its test.
package card
