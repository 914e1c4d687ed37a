// Package routerbench measures what the router costs against other routers, on one machine and in one run: mock workers that
// speak the TensorRT-LLM worker protocol, a load generator, the plainest two-leg Go router as the unit of every ratio
// (naive-go-pd), one proxy hop of httputil.ReverseProxy and of nginx, and both legs played directly as the floor. The
// subjects take turns within each round, so that what the machine does meanwhile meets all of them.
//
// Worker and load generator speak HTTP/1.1 by hand over bare connections: they share the processors with the subject, and
// what they cost makes every ratio smaller. The package knows the public API and the workers' protocol; it starts the
// router as a process and reads its costs from /proc. One load against one other subject (Plan.Only, Plan.Against) takes seconds.
package routerbench
