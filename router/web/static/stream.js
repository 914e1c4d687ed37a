// One stream of server-sent events; it comes back after a break with the number of the last row that it brought.
export const get = (url, signal) => fetch(url, { signal, cache: 'no-store' });

// follow calls take(event, data) for every event and state(text, ok) when the connection changes. address() gives the URL; where take
// returns true the stream is begun anew, from what address() gives then.
export async function follow(address, take, state) {
  for (let wait = 500; ; wait = Math.min(wait * 2, 8000)) {
    try {
      const r = await get(address());
      if (r.status === 401 || r.status === 403) {
        state('not allowed: load the page anew with the key of an administrator as the password', false);
        return;
      }
      if (!r.ok) throw new Error('status ' + r.status);
      state('live', true);
      wait = 500;
      await read(r.body.getReader(), take);
      state('the router closed the stream; coming back', false);
    } catch (e) {
      state('not reachable: ' + e.message, false);
    }
    await new Promise(done => setTimeout(done, wait));
  }
}

async function read(reader, take) {
  const decoder = new TextDecoder();
  let rest = '';
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const parts = (rest + decoder.decode(value, { stream: true })).split('\n\n');
    rest = parts.pop();
    for (const part of parts) {
      let name = 'message', data = '';
      for (const line of part.split('\n')) {
        if (line.startsWith('event: ')) name = line.slice(7);
        else if (line.startsWith('data: ')) data += line.slice(6);
      }
      if (data && take(name, JSON.parse(data))) return reader.cancel();
    }
  }
}
