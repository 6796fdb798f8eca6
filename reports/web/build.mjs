// Builds report.js and report.css from src: what the program embeds. `--check` compares instead, and says what differs.
import { spawnSync } from 'node:child_process';
import { readFileSync, writeFileSync } from 'node:fs';
import { dirname, join } from 'node:path';
import { fileURLToPath } from 'node:url';
import { build } from 'esbuild';

const here = dirname(fileURLToPath(import.meta.url));
const check = process.argv.includes('--check');
if (spawnSync(process.execPath, [join(here, 'node_modules/typescript/bin/tsc'), '-p', here], { stdio: 'inherit' }).status !== 0) process.exit(1);

const result = await build({
  entryPoints: { report: join(here, 'src/main.ts'), style: join(here, 'src/report.css') },
  bundle: true,
  minify: true,
  charset: 'utf8',
  format: 'iife',
  target: ['chrome103', 'firefox113', 'safari16.4'],
  legalComments: 'none',
  outdir: here,
  write: false,
});
let differs = false;
for (const file of result.outputFiles) {
  const path = join(here, file.path.endsWith('.css') ? 'report.css' : 'report.js');
  const text = file.text.replaceAll('</script', '<\\/script');
  if (!check) {
    writeFileSync(path, text);
    console.log(`${path}: ${text.length} bytes`);
  } else if (readFileSync(path, 'utf8') !== text) {
    console.error(`${path} is not what its sources build to: run ./dev report-build`);
    differs = true;
  }
}
process.exit(differs ? 1 : 0);
