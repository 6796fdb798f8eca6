// The committed report.js and report.css are what their sources build to; skipped where esbuild is not installed.
import { existsSync } from 'node:fs';
import { fileURLToPath } from 'node:url';

const web = fileURLToPath(new URL('../../reports/web/', import.meta.url));
if (!existsSync(web + 'node_modules/esbuild') || !existsSync(web + 'node_modules/typescript')) {
  console.log('skipped: no esbuild in reports/web/node_modules; ./dev browser fetches it');
} else {
  process.argv.push('--check');
  await import(web + 'build.mjs');
}
