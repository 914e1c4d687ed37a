// Package compose holds the test that brings docker-compose.yml up and uses it. It holds nothing else.
package compose
