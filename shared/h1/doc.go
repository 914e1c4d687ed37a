// Package h1 serves HTTP/1.1 requests of the ordinary form with one read and one write of the socket each, and no goroutine
// beside the connection's own: net/http's server needs a second one, two buffers and four system calls more. Ordinary is a
// POST with a Content-Length, without Expect, Upgrade or a transfer encoding; its handler is an http.Handler as any other.
// A connection that brings anything else is handed over, with what was read of it, to net/http for good.
//
// What could be read in two ways is refused: bare line feeds, a length beside a transfer encoding, space before a colon.
// Whether the client has left is seen by one epoll for all connections, so that a request costs nothing for it. The context of a
// request is that of its connection: it ends when the client has left, not when the handler returns, so what a handler makes of
// it the handler ends. A request, its header and its body are used again for the next.
package h1
