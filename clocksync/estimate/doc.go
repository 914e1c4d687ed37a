// Package estimate owns the estimate of one clock against another: exchanges in; offset, skew, proven bounds and a state
// out. It is pure: no clock, no socket, no goroutine; whoever owns an Estimator calls it from one goroutine.
//
// The bound is proven and the point is guessed, by different means. Each exchange proves a lower bound of the offset at
// T2 and an upper one at T3. Two declared limits of physics carry them to other moments: |skew| <= Rho and
// |d skew/dt| <= Eta. With m fixed and d = x - m, every offset curve that the limits allow obeys, for its value θ and
// slope b at m,
//
//	θ + b·d >= lower(x) - Eta/2·d²   and   θ + b·d <= upper(x) + Eta/2·d²
//
// so a line must pass above the points (d, lower - Eta/2·d²) and below the points (d, upper + Eta/2·d²): two convex
// hulls. The quadratic slack is the ageing: an old sample simply stops binding. The point estimate is a weighted line
// through the middles of the bursts, clamped into the bound.
package estimate
