// Package truth holds the tests in which real processes and real sockets meet a truth that is known: time namespaces shift
// a clock by a known amount, faults bend it by a known rate, network namespaces and a TUN shuttle delay the packets, and a
// scripted chronyd tells a known UTC. What needs root, a device or a program that is missing is skipped with the reason.
package truth
