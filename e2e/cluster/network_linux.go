package cluster

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"time"

	"meridian.internal/shared/shuttle"
)

// network gives nodes a place of their own: a network namespace behind a path of known delay, a time namespace. All other
// processes, and the ends of the paths, are on one address of this machine that every namespace reaches.
type network struct {
	host  string
	names map[string]string // node -> network namespace
	addrs map[string]string // node -> address in it
	stops []func()          // in the order of making
}

// tag keeps the devices and namespaces of several clusters apart, and tells whose they are.
func tag() string { return fmt.Sprintf("mer%d", os.Getpid()) }

// newNetwork makes what the places of nodes ask for. Without a path nothing is made.
func newNetwork(places map[string]Place) (*network, error) {
	n := &network{host: loopback, names: map[string]string{}, addrs: map[string]string{}}
	var behind []string
	for name, p := range places {
		if p.There != (shuttle.Path{}) || p.Back != (shuttle.Path{}) {
			behind = append(behind, name)
		}
	}
	if len(behind) == 0 {
		return n, nil
	}
	if os.Geteuid() != 0 {
		return nil, errors.New("a node behind a delayed path needs root, for namespaces and a TUN device")
	}
	slices.Sort(behind)
	sweep()
	subnet := fmt.Sprintf("10.%d", 64+os.Getpid()%128)
	n.host = subnet + ".0.1"
	err := n.do("ip", "addr", "add", n.host+"/32", "dev", "lo")
	n.undo("ip", "addr", "del", n.host+"/32", "dev", "lo")
	for i, name := range behind {
		if err == nil {
			err = n.path(name, fmt.Sprintf("%s.%d", subnet, i+1), i, places[name])
		}
	}
	if err != nil {
		n.close()
		return nil, err
	}
	return n, nil
}

// path makes a namespace and a shuttle to it.
func (n *network) path(name, subnet string, i int, p Place) error {
	ns, near, far := fmt.Sprintf("%s-%d", tag(), i), fmt.Sprintf("%sh%d", tag(), i), fmt.Sprintf("%sn%d", tag(), i)
	if err := n.do("ip", "netns", "add", ns); err != nil {
		return err
	}
	n.undo("ip", "netns", "del", ns)
	a, err := shuttle.Open(near)
	if err != nil {
		return err
	}
	b, err := shuttle.Open(far)
	if err != nil {
		a.Close()
		return err
	}
	n.stops = append(n.stops, shuttle.Start(a, b, p.There, p.Back))
	here, there := subnet+".1", subnet+".2"
	n.names[name], n.addrs[name] = ns, there
	for _, c := range [][]string{
		{"ip", "link", "set", far, "netns", ns},
		{"ip", "addr", "add", here, "peer", there, "dev", near},
		{"ip", "link", "set", near, "up"},
		{"ip", "-n", ns, "link", "set", "lo", "up"},
		{"ip", "-n", ns, "addr", "add", there, "peer", here, "dev", far},
		{"ip", "-n", ns, "link", "set", far, "up"},
		{"ip", "-n", ns, "route", "add", "default", "dev", far},
	} {
		if err := n.do(c...); err != nil {
			return err
		}
	}
	return nil
}

func (n *network) do(a ...string) error {
	if out, err := exec.Command(a[0], a[1:]...).CombinedOutput(); err != nil {
		return fmt.Errorf("%s: %w: %s", strings.Join(a, " "), err, strings.TrimSpace(string(out)))
	}
	return nil
}

func (n *network) undo(a ...string) { n.stops = append(n.stops, func() { _ = n.do(a...) }) }

// close takes everything down again, the last first.
func (n *network) close() {
	for _, stop := range slices.Backward(n.stops) {
		stop()
	}
	n.stops = nil
}

// address is where a node listens and is reached.
func (n *network) address(node string) string {
	if a, ok := n.addrs[node]; ok {
		return a
	}
	return n.host
}

// enter is the command line before a node's own that puts it where it belongs. Each part replaces itself by the next, so that
// the process stays the one that was started.
func (n *network) enter(node string, p Place) (prefix []string) {
	if ns, ok := n.names[node]; ok {
		prefix = append(prefix, "ip", "netns", "exec", ns)
	}
	if p.ClockShift != 0 {
		prefix = append(prefix, "unshare", "--time", "--monotonic", strconv.FormatInt(int64(p.ClockShift/time.Second), 10))
	}
	return prefix
}

// CanPlace says why nodes cannot be given places here, nil if they can.
func CanPlace() error {
	if os.Geteuid() != 0 {
		return errors.New("time and network namespaces need root")
	}
	own, err := os.Readlink("/proc/self/ns/time")
	if err != nil {
		return fmt.Errorf("no time namespaces: %w", err)
	}
	out, err := exec.Command("unshare", "--time", "--monotonic", "1000", "readlink", "/proc/self/ns/time").CombinedOutput()
	if err != nil {
		return fmt.Errorf("enter a time namespace: %w: %s", err, strings.TrimSpace(string(out)))
	}
	if strings.TrimSpace(string(out)) == own {
		return errors.New("this kernel moves only children into a time namespace, not the process that asks")
	}
	n, err := newNetwork(map[string]Place{"probe": {There: shuttle.Path{Delay: time.Millisecond}}})
	if err != nil {
		return err
	}
	n.close()
	return nil
}

// sweep removes the namespaces of clusters that were killed.
func sweep() {
	list, _ := os.ReadDir("/run/netns")
	for _, e := range list {
		var pid, i int
		if _, err := fmt.Sscanf(e.Name(), "mer%d-%d", &pid, &i); err != nil {
			continue
		}
		if _, err := os.Stat(fmt.Sprintf("/proc/%d", pid)); errors.Is(err, os.ErrNotExist) {
			_ = exec.Command("ip", "netns", "del", e.Name()).Run()
		}
	}
}
