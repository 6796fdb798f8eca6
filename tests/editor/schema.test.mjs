// The JSON Schema of `shardlab schema`, as an editor uses it: yaml-language-server reads it, finds nothing wrong in the sweeps that ship,
// marks mistakes at their lines, tells what a key means and completes words. Skipped where the server is not installed.
import assert from 'node:assert/strict';
import { execFileSync, spawn } from 'node:child_process';
import { existsSync, mkdtempSync, readFileSync, readdirSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join, relative } from 'node:path';
import { after, before, test } from 'node:test';
import { fileURLToPath, pathToFileURL } from 'node:url';

const here = fileURLToPath(new URL('.', import.meta.url)), root = join(here, '../..');
const server = join(here, 'node_modules/yaml-language-server/bin/yaml-language-server');
const missing = !existsSync(server) ? 'no yaml-language-server in tests/editor/node_modules; ./dev browser fetches it'
  : !process.env.SHARDLAB ? 'no SHARDLAB: run it through ctest' : '';
if (missing !== '') {
  console.log('skipped: ' + missing);
  process.exit(0);
}

/// An editor's side of the language server protocol: requests with their answers, and what the server publishes of itself.
class Editor {
  constructor() {
    this.process = spawn(process.execPath, [server, '--stdio'], { stdio: ['pipe', 'pipe', 'inherit'] });
    this.read = Buffer.alloc(0), this.last = 0, this.asked = new Map(), this.published = new Map();
    this.process.stdout.on('data', bytes => this.take(bytes));
  }
  take(bytes) {
    this.read = Buffer.concat([this.read, bytes]);
    for (;;) {
      const head = this.read.indexOf('\r\n\r\n');
      if (head < 0) return;
      const begin = head + 4, end = begin + Number(/Content-Length: (\d+)/i.exec(this.read.toString('latin1', 0, head))[1]);
      if (this.read.length < end) return;
      const message = JSON.parse(this.read.toString('utf8', begin, end));
      this.read = this.read.subarray(end);
      if (message.id !== undefined && message.method !== undefined) this.send({ id: message.id, result: this.setting(message) });
      else if (message.id !== undefined) this.asked.get(message.id)(message);
      else if (message.method === 'textDocument/publishDiagnostics') this.published.get(message.params.uri)?.(message.params.diagnostics);
    }
  }
  /// What the server asks of an editor: its settings. The schema is named by the files themselves.
  setting(message) {
    return message.method === 'workspace/configuration' ? message.params.items.map(item => item.section === 'yaml' ? { validate: true, hover: true, completion: true, schemaStore: { enable: false } } : {}) : null;
  }
  send(message) {
    const text = JSON.stringify({ jsonrpc: '2.0', ...message });
    this.process.stdin.write(`Content-Length: ${Buffer.byteLength(text)}\r\n\r\n${text}`);
  }
  ask(method, params) {
    const id = ++this.last;
    return new Promise((resolve, reject) => {
      this.asked.set(id, answer => answer.error ? reject(new Error(answer.error.message)) : resolve(answer.result));
      this.send({ id, method, params });
    });
  }
  async start() {
    await this.ask('initialize', { processId: process.pid, rootUri: null, capabilities: { workspace: { configuration: true }, textDocument: { hover: {}, completion: { completionItem: {} } } } });
    this.send({ method: 'initialized', params: {} });
  }
  /// Opens a text, and tells what the server marks in it: lines from 1 on, with the message.
  async open(text) {
    const uri = pathToFileURL(join(folder, `${this.published.size}.yaml`)).href;
    const marks = new Promise(resolve => this.published.set(uri, resolve));
    this.send({ method: 'textDocument/didOpen', params: { textDocument: { uri, languageId: 'yaml', version: 1, text } } });
    return { uri, marks: (await marks).map(m => ({ line: m.range.start.line + 1, message: m.message })) };
  }
}

let editor, folder;
before(async () => {
  folder = mkdtempSync(join(tmpdir(), 'shardlab-editor-'));
  for (const kind of ['sweep', 'case']) writeFileSync(join(folder, kind + '.json'), execFileSync(process.env.SHARDLAB, ['schema', kind]));
  editor = new Editor();
  await editor.start();
});
after(() => {
  editor?.process.kill();
  rmSync(folder, { recursive: true, force: true });
});

// The first line is the one that the schema's help names: it makes every line one later.
const headed = (text, kind = 'sweep') => `# yaml-language-server: $schema=${join(folder, kind + '.json')}\n${text}`;
const files = (path, found = []) => {
  for (const entry of readdirSync(path, { withFileTypes: true }))
    if (entry.isDirectory()) files(join(path, entry.name), found);
    else if (entry.name.endsWith('.yaml')) found.push(join(path, entry.name));
  return found;
};
const shipped = files(join(root, 'sweeps')).filter(f => !/sweeps\/(machines|models)\//.test(f));

test('the sweeps that ship have no mistake', async () => {
  assert.ok(shipped.length >= 20);
  for (const file of shipped) assert.deepEqual((await editor.open(headed(readFileSync(file, 'utf8')))).marks, [], relative(root, file));
});

// Mistakes that a schema can know: words, ranges, forms, keys. The line is where `shardlab` itself finds them.
for (const name of ['zero-4', 'unknown-key', 'unknown-layout-key', 'dp-zero', 'dp-fraction', 'dp-word', 'layout-word', 'recompute-unknown', 'schedule-unknown', 'optimizer-unknown',
  'precision-unknown', 'steps-zero', 'transport-unknown', 'backend-unknown', 'unknown-mode', 'train-list', 'key-in-wrong-section', 'a-list', 'search-kind', 'list-where-value'])
  test(`the mistake of ${name}.yaml is marked`, async () => {
    const path = join(root, 'tests/refusals/bad_files/sweeps', name + '.yaml'), golden = readFileSync(join(root, 'tests/golden/refusals/sweeps.txt'), 'utf8');
    const line = Number(new RegExp(`sweeps/${name}\\.yaml:(\\d+):`).exec(golden)[1]);
    const { marks } = await editor.open(headed(readFileSync(path, 'utf8')));
    assert.ok(marks.some(m => m.line === line + 1), `line ${line + 1} is not among ${JSON.stringify(marks)}`);
  });

test('a key tells what it means, and a value is completed', async () => {
  const { uri } = await editor.open(headed('model: llama3-8b\nmachine: hgx-h100-ndr\nlayout:\n  zero: 1\n  schedule: \n'));
  const hover = await editor.ask('textDocument/hover', { textDocument: { uri }, position: { line: 4, character: 3 } });
  assert.match(JSON.stringify(hover.contents), /ZeRO/i);
  const completion = await editor.ask('textDocument/completion', { textDocument: { uri }, position: { line: 5, character: 12 } });
  const words = (completion.items ?? completion).map(i => i.label);
  for (const word of ['1f1b', 'zb-h1', 'dualpipe']) assert.ok(words.includes(word), `${word} is not among ${words}`);
});
