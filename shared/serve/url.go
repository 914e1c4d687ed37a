package serve

import (
	"errors"
	"net/url"
)

// HostOf is the host and port of a server's URL.
func HostOf(server string) (string, error) {
	u, err := url.Parse(server)
	if err != nil || u.Host == "" || (u.Scheme != "http" && u.Scheme != "https") {
		return "", errors.New("want http://host:port")
	}
	return u.Host, nil
}
