'use strict';
// The report's page: reads the JSON in #data, draws every section. No library, no network.
(() => {
  const data = JSON.parse(document.getElementById('data').textContent);
  const app = document.getElementById('app');
  const tip = document.getElementById('tip');
  const column = Object.fromEntries(data.columns.map((c, i) => [c.name, i]));
  const value = (c, name) => c.values[column[name]];
  const state = { selected: Math.max(0, data.summary.fastest), redraws: [], onSelect: [] };

  // ---- Elements -------------------------------------------------------------------------------------------------------------

  function fill(node, attributes, children) {
    for (const [key, v] of Object.entries(attributes || {})) {
      if (v === null || v === undefined || v === false) continue;
      if (key.startsWith('on')) node.addEventListener(key.slice(2), v);
      else node.setAttribute(key, v === true ? '' : v);
    }
    for (const child of children.flat(Infinity)) if (child !== null && child !== undefined) node.append(child);
    return node;
  }
  const el = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
  const svg = (tag, attributes, ...children) => fill(document.createElementNS('http://www.w3.org/2000/svg', tag), attributes, children);
  const css = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  function isDark() {
    const chosen = document.documentElement.dataset.theme;
    return chosen ? chosen === 'dark' : matchMedia('(prefers-color-scheme: dark)').matches;
  }

  function section(id, title, note) {
    const node = el('section', { id, 'aria-labelledby': 'h-' + id }, el('h2', { id: 'h-' + id }, title));
    if (note) node.append(el('p', { class: 'note' }, note));
    app.append(node);
    return node;
  }

  function showTip(text, x, y) {
    tip.textContent = text;
    tip.hidden = false;
    const box = tip.getBoundingClientRect();
    tip.style.left = Math.max(4, Math.min(x + 14, innerWidth - box.width - 6)) + 'px';
    tip.style.top = (y + 18 + box.height > innerHeight ? Math.max(4, y - box.height - 10) : y + 16) + 'px';
  }
  const hideTip = () => { tip.hidden = true; };

  // ---- Quantities, as reports/format.cpp writes them ------------------------------------------------------------------------

  const digits = v => { const m = Math.abs(v); return v.toFixed(m >= 999.95 ? 0 : m >= 99.995 ? 1 : m >= 9.9995 ? 2 : 3); };
  function scaled(v, scales) {
    for (const [size, name] of scales) if (Math.abs(v) >= size) return digits(v / size) + ' ' + name;
    const [size, name] = scales[scales.length - 1];
    return digits(v / size) + ' ' + name;
  }
  const kBytes = [[2 ** 50, 'PiB'], [2 ** 40, 'TiB'], [2 ** 30, 'GiB'], [2 ** 20, 'MiB'], [1024, 'KiB']];
  const kSeconds = [[1, 's'], [1e-3, 'ms'], [1e-6, 'us'], [1e-9, 'ns']];
  const kCounts = [[1e18, 'E'], [1e15, 'P'], [1e12, 'T'], [1e9, 'G'], [1e6, 'M'], [1e3, 'k']];
  const bytes = v => Math.abs(v) < 1024 ? Math.round(v) + ' B' : scaled(v, kBytes);
  const seconds = v => v === 0 ? '0 s' : scaled(v, kSeconds);
  const count = v => Math.abs(v) < 1000 ? (Number.isInteger(v) ? String(v) : digits(v)) : scaled(v, kCounts);
  const signed = v => (v > 0 ? '+' : '') + v.toFixed(2) + ' %';
  function human(v, unit) {
    if (v === null || v === undefined) return '';
    if (typeof v === 'boolean') return v ? 'yes' : 'no';
    if (typeof v !== 'number') return String(v);
    switch (unit) {
      case 'B': return bytes(v);
      case 's': return seconds(v);
      case '%': return signed(v);
      case 'fraction': return (v * 100).toFixed(2) + ' %';
      case 'tokens/s': return count(v) + ' tok/s';
      case 'count': return count(v);
      case 'flop': return count(v) + (Math.abs(v) < 1000 ? ' ' : '') + 'flop';
      case 'J': return v.toPrecision(4) + ' J';
      case 'nat': return v.toFixed(4);
    }
    return Number.isInteger(v) ? String(v) : String(+v.toPrecision(4));
  }

  const nameOf = c => value(c, 'name') || c.layout;
  const titleOf = c => nameOf(c).replaceAll('-', ' ') === c.layout.replaceAll('-', ' ') ? c.layout : nameOf(c) + ' (' + c.layout + ')';

  function select(index) {
    if (index === state.selected) return;
    state.selected = index;
    for (const react of state.onSelect) react();
  }
  function caseSelect(label, indices) {
    const box = el('select', { onchange: () => select(+box.value) }, indices.map(i => el('option', { value: i }, titleOf(data.cases[i]))));
    const sync = () => { if (indices.includes(state.selected)) box.value = state.selected; };
    state.onSelect.push(sync);
    sync();
    return el('label', {}, label, box);
  }
  /// Calls `draw(width)` now, when the width of `node` changes, and when the colours change.
  function drawn(node, draw) {
    let last = 0;
    const redraw = () => { const w = node.clientWidth; if (w > 0) { last = w; draw(w); } };
    new ResizeObserver(() => { if (Math.abs(node.clientWidth - last) > 1) redraw(); }).observe(node);
    state.redraws.push(redraw);
    redraw();
    return redraw;
  }

  // ---- Answer ---------------------------------------------------------------------------------------------------------------

  function accuracy() {
    const rows = data.summary.accuracy;
    if (rows.length === 0) return;
    const head = ['ranks', 'cases', 'median |error|', 'worst |error|', 'within 10 %', 'median unplanned', 'peak exact', 'wire exact'];
    const cell = t => el('td', { class: 'n' }, t);
    const body = rows.map(a => el('tr', {}, el('td', { class: 'n' }, a.ranks === 0 ? 'all' : String(a.ranks)), cell(String(a.cases)),
      el('td', { class: 'n ' + (a.median_abs_pct <= 10 ? 'near' : 'far') }, a.median_abs_pct.toFixed(2) + ' %'), cell(a.worst_abs_pct.toFixed(2) + ' %'),
      cell(a.within_10 + ' of ' + a.cases), cell((a.median_unplanned * 100).toFixed(2) + ' %'),
      cell(a.peak_exact + ' of ' + a.cases), cell(a.wire_exact + ' of ' + a.wire_cases)));
    document.getElementById('accuracy').append(el('h3', {}, 'How good the predictions were'), el('div', { class: 'scroll compact', style: 'width:fit-content', tabindex: 0, role: 'region', 'aria-label': 'Accuracy by ranks' },
      el('table', { class: 'compact' }, el('thead', {}, el('tr', {}, head.map(h => el('th', { scope: 'col', class: 'n' }, h)))), el('tbody', {}, body))));
  }

  const kUnluckyRows = 12;

  function unlucky() {
    const rows = data.cases.map((c, i) => i).filter(i => value(data.cases[i], 'status') !== 'ok');
    if (rows.length === 0) return;
    const node = document.getElementById('answer');
    node.append(el('h3', {}, 'What did not run, and why'), el('ul', { class: 'unlucky' }, rows.slice(0, kUnluckyRows).map(i => {
      const c = data.cases[i];
      return el('li', {}, el('span', { class: 'status ' + value(c, 'status') }, value(c, 'status')), ' ', el('b', {}, titleOf(c)), ': ', value(c, 'reason') || 'no reason given');
    })));
    if (rows.length > kUnluckyRows) node.append(el('p', { class: 'note' }, 'And ' + (rows.length - kUnluckyRows) + ' more: the table of cases has every reason.'));
  }

  // ---- Cases ----------------------------------------------------------------------------------------------------------------

  const kShown = ['name', 'status', 'world_size', 'predicted_step_s', 'measured_step_s', 'step_error_pct', 'measured_tokens_per_s', 'predicted_tokens_per_s', 'measured_mfu',
    'predicted_peak_bytes', 'measured_peak_bytes', 'predicted_wire_bytes', 'measured_wire_bytes', 'unplanned_time_s', 'loss_last', 'tokens_to_loss',
    'measured_s_to_loss', 'reason'];

  function test(c, term) {
    const m = /^([a-z_]+)(<=|>=|!=|=|<|>)(.*)$/.exec(term);
    if (!m || !(m[1] in column)) return (titleOf(c) + ' ' + c.values.join(' ')).toLowerCase().includes(term);
    const v = value(c, m[1]);
    if (v === null) return false;
    const a = typeof v === 'number' ? v : String(v).toLowerCase(), b = typeof v === 'number' ? +m[3] : m[3];
    switch (m[2]) {
      case '=': return a === b;
      case '!=': return a !== b;
      case '<': return a < b;
      case '>': return a > b;
      case '<=': return a <= b;
      default: return a >= b;
    }
  }

  function casesSection() {
    const node = section('cases', 'Cases', 'Click a heading to sort, a case to see why it is as fast as it is. The filter takes words and comparisons: tp=2 measured_step_s<0.1');
    const used = data.columns.map((c, i) => data.cases.some(o => o.values[i] !== null));
    let shown = kShown.filter(name => used[column[name]]);
    if (shown.includes('measured_tokens_per_s')) shown = shown.filter(name => name !== 'predicted_tokens_per_s');
    let sort = { name: null, down: true };
    const filter = el('input', { type: 'search', placeholder: 'Filter', 'aria-label': 'Filter cases', oninput: () => draw() });
    const statuses = [...new Set(data.cases.map(c => value(c, 'status')))];
    const hidden = new Set();
    const chips = statuses.map(s => el('label', {}, el('input', { type: 'checkbox', checked: true, onchange: e => { if (e.target.checked) hidden.delete(s); else hidden.add(s); draw(); } }),
      s + ' ' + data.cases.filter(c => value(c, 'status') === s).length));
    const tally = el('span', { class: 'note', role: 'status' });
    const chooser = el('details', {}, el('summary', {}, 'Columns'), el('div', { class: 'chooser' }, data.columns.map(c =>
      el('label', { title: c.help }, el('input', { type: 'checkbox', checked: shown.includes(c.name), disabled: !used[column[c.name]], onchange: e => {
        if (e.target.checked) shown = data.columns.map(d => d.name).filter(name => name === c.name || shown.includes(name));
        else shown = shown.filter(name => name !== c.name);
        draw();
      } }), ' ' + c.name))));
    const table = el('table', {});
    node.append(el('div', { class: 'bar' }, filter, chips, el('button', { type: 'button', onclick: saveCsv }, 'Save CSV'), tally), chooser,
      el('div', { class: 'scroll tall', tabindex: 0, role: 'region', 'aria-label': 'Table of cases' }, table));

    function order() {
      const terms = filter.value.toLowerCase().split(/\s+/).filter(t => t);
      const rows = data.cases.map((c, i) => i).filter(i => !hidden.has(value(data.cases[i], 'status')) && terms.every(t => test(data.cases[i], t)));
      if (sort.name) rows.sort((a, b) => {
        const x = value(data.cases[a], sort.name), y = value(data.cases[b], sort.name);
        if (x === null || y === null) return x === y ? a - b : x === null ? 1 : -1;
        const less = typeof x === 'number' && typeof y === 'number' ? x - y : String(x).localeCompare(String(y), 'en', { numeric: true });
        return (sort.down ? less : -less) || a - b;
      });
      return rows;
    }
    const numeric = name => data.cases.some(c => typeof value(c, name) === 'number');
    function headCell(name, first) {
      const c = data.columns[column[name]];
      const arrow = sort.name === name ? (sort.down ? ' ▲' : ' ▼') : '';
      return el('th', { scope: 'col', class: (numeric(name) ? 'n ' : '') + (first ? 'first' : ''), title: c.name + ': ' + c.help, 'aria-sort': sort.name === name ? (sort.down ? 'ascending' : 'descending') : null },
        el('button', { type: 'button', onclick: () => { sort = { name, down: sort.name === name ? !sort.down : true }; draw(); table.querySelector('[data-sort=' + name + ']').focus(); }, 'data-sort': name }, c.heading + arrow));
    }
    function bodyCell(c, i, name, first) {
      const v = value(c, name), text = human(v, data.columns[column[name]].unit);
      if (first) return el('td', { class: 'first', title: titleOf(c) }, el('button', { type: 'button', class: 'link', 'aria-pressed': String(i === state.selected), onclick: () => select(i) }, text || c.layout));
      if (name === 'status') return el('td', {}, el('span', { class: 'status ' + v }, text));
      if (name === 'reason') return el('td', { class: 'long', title: text }, text);
      if (name === 'step_error_pct' && v !== null) return el('td', { class: 'n ' + (Math.abs(v) <= 10 ? 'near' : 'far') }, text);
      return el('td', { class: typeof v === 'number' ? 'n' : '' }, text);
    }
    function draw() {
      const rows = order();
      tally.textContent = rows.length === data.cases.length ? rows.length + ' cases' : rows.length + ' of ' + data.cases.length + ' cases';
      table.replaceChildren(el('thead', {}, el('tr', {}, shown.map((name, k) => headCell(name, k === 0)))), el('tbody', {}, rows.map(i =>
        el('tr', { class: 'pick' + (i === state.selected ? ' selected' : ''), 'data-case': i, onclick: () => select(i) }, shown.map((name, k) => bodyCell(data.cases[i], i, name, k === 0))))));
    }
    function mark() {
      for (const row of table.tBodies[0].rows) {
        row.classList.toggle('selected', +row.dataset.case === state.selected);
        row.querySelector('button').setAttribute('aria-pressed', String(+row.dataset.case === state.selected));
      }
    }
    state.onSelect.push(mark);
    draw();
    why(node);
  }

  function saveCsv() {
    const field = v => v === null ? '' : /[",\r\n]/.test(String(v)) ? '"' + String(v).replaceAll('"', '""') + '"' : String(v);
    const text = [data.columns.map(c => c.name), ...data.cases.map(c => c.values)].map(row => row.map(field).join(',') + '\n').join('');
    const link = el('a', { href: URL.createObjectURL(new Blob([text], { type: 'text/csv' })), download: 'results.csv' });
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  }

  function why(parent) {
    const box = el('div', { 'aria-live': 'polite' });
    parent.append(box);
    const draw = () => {
      const c = data.cases[state.selected];
      if (c) box.replaceChildren(el('h3', {}, 'Why ' + titleOf(c) + ' is as fast as it is'), el('ul', { class: 'why' }, c.reasons.map(r => el('li', {}, r))));
    };
    state.onSelect.push(draw);
    draw();
  }

  // ---- Memory ---------------------------------------------------------------------------------------------------------------

  const kMemoryRows = 40;

  function memorySection() {
    const cases = data.cases.map((c, i) => i).filter(i => value(data.cases[i], 'predicted_peak_bytes') !== null);
    if (cases.length === 0) return;
    const node = section('memory', 'Memory at the peak', 'Live bytes of the largest rank by class, predicted. The upright mark is the measured peak.');
    const peak = i => Math.max(value(data.cases[i], 'predicted_peak_bytes'), value(data.cases[i], 'measured_peak_bytes') || 0);
    const most = Math.max(...cases.map(peak));
    const budgets = cases.map(i => data.cases[i].budget).filter(b => b > 0);
    const budgetFits = budgets.length > 0 && Math.min(...budgets) <= 2 * most;
    const scale = budgetFits ? Math.max(most, Math.min(Math.max(...budgets), 2 * most)) : most;
    const classes = data.classes.map((name, k) => k).filter(k => cases.some(i => data.cases[i].memory[k] > 0));
    node.append(el('ul', { class: 'legend' }, classes.map(k => el('li', {}, el('i', { style: 'background:var(--c' + k + ')' }), data.classes[k])),
      budgetFits ? el('li', {}, el('i', { style: 'background:none;border-left:2px dashed var(--budget);border-radius:0;width:4px' }), 'budget of one rank') : null));
    if (budgets.length > 0 && !budgetFits) node.append(el('p', { class: 'note' }, 'The budget of one rank, ' + bytes(Math.min(...budgets)) + ', lies far to the right: the largest case takes ' + (100 * most / Math.min(...budgets)).toFixed(1) + ' % of it.'));
    const grid = el('div', { class: 'mem', role: 'list' });
    const rows = [...cases].sort((a, b) => peak(b) - peak(a) || a - b);
    const more = el('button', { type: 'button', onclick: () => { draw(rows.length); more.remove(); } }, 'Show all ' + rows.length);
    node.append(grid);
    if (rows.length > kMemoryRows) node.append(el('div', { class: 'bar' }, more));

    function bar(i) {
      const c = data.cases[i], predicted = value(c, 'predicted_peak_bytes'), measured = value(c, 'measured_peak_bytes');
      const parts = [];
      let at = 0;
      for (const k of classes) {
        const size = c.memory[k];
        if (!(size > 0)) continue;
        const left = at;
        parts.push(el('span', { style: 'left:' + 100 * left / scale + '%;width:' + 100 * size / scale + '%;background:var(--c' + k + ')',
          onpointermove: e => showTip(data.classes[k] + ': ' + bytes(size) + '\n' + size.toLocaleString('en') + ' B, ' + (100 * size / predicted).toFixed(1) + ' % of the peak', e.clientX, e.clientY), onpointerleave: hideTip }));
        at += size;
      }
      if (measured !== null) parts.push(el('b', { style: 'left:calc(' + 100 * measured / scale + '% - 1px)' }));
      if (budgetFits && c.budget > 0 && c.budget <= scale) parts.push(el('em', { style: 'left:' + 100 * c.budget / scale + '%' }));
      const over = c.budget > 0 && predicted > c.budget;
      const off = over ? ', over budget' : measured === null ? '' : measured === predicted ? ', 0 B off' : ', ' + bytes(measured - predicted) + ' off';
      const label = titleOf(c) + ': ' + bytes(predicted) + off + '; ' + classes.filter(k => c.memory[k] > 0).map(k => data.classes[k] + ' ' + bytes(c.memory[k])).join(', ');
      return el('div', { role: 'listitem', class: 'case', 'aria-label': label }, el('span', { class: 'name', title: titleOf(c) }, nameOf(c)), el('span', { class: 'track' }, parts), el('span', { class: 'size' + (over ? ' far' : '') }, bytes(predicted) + off));
    }
    function draw(n) { grid.replaceChildren(...rows.slice(0, n).map(bar)); }
    draw(kMemoryRows);
  }

  // ---- Predicted against measured -------------------------------------------------------------------------------------------

  /// Ticks of a logarithmic axis between `low` and `high`: powers of ten, with as many steps between them as leaves four to nine or so.
  function logTicks(low, high) {
    const at = digits => {
      const out = [];
      for (let e = Math.floor(Math.log10(low)); e <= Math.ceil(Math.log10(high)); ++e)
        for (const m of digits) { const v = +(m + 'e' + e); if (v >= low * 0.999 && v <= high * 1.001) out.push(v); }
      return out;
    };
    const few = at([1]), some = at([1, 2, 5]), many = at([1, 1.5, 2, 3, 4, 5, 6, 8]);
    return some.length > 9 ? few : some.length >= 4 ? some : many;
  }
  function linearTicks(low, high, about) {
    const raw = (high - low) / about || 1, power = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 5, 10].map(m => m * power).find(s => s >= raw);
    const out = [];
    for (let v = Math.ceil(low / step) * step; v <= high + step * 1e-9; v += step) out.push(+v.toPrecision(12));
    return out;
  }
  const trim = text => text.replace(/\.0+ /, ' ').replace(/(\.\d*?)0+ /, '$1 ');

  const kShapes = [
    (x, y, r) => svg('circle', { cx: x, cy: y, r }),
    (x, y, r) => svg('rect', { x: x - r * 0.9, y: y - r * 0.9, width: 1.8 * r, height: 1.8 * r }),
    (x, y, r) => svg('path', { d: `M${x} ${y - 1.2 * r}L${x + 1.2 * r} ${y + r}L${x - 1.2 * r} ${y + r}Z` }),
    (x, y, r) => svg('path', { d: `M${x} ${y - 1.3 * r}L${x + 1.3 * r} ${y}L${x} ${y + 1.3 * r}L${x - 1.3 * r} ${y}Z` }),
  ];

  function predictionSection() {
    const both = data.cases.map((c, i) => i).filter(i => value(data.cases[i], 'step_error_pct') !== null);
    const withOps = data.cases.map((c, i) => i).filter(i => data.cases[i].ops.length > 0);
    if (both.length === 0 && withOps.length === 0) return;
    const node = section('prediction', both.length > 0 ? 'Predicted against measured' : 'Ops of a step');
    const left = el('div'), right = el('div');
    node.append(both.length > 0 ? el('div', { class: 'split' }, left, right) : right);
    if (both.length > 0) scatter(left, both);
    if (withOps.length > 0) opTable(right, withOps);
  }

  function scatter(node, cases) {
    const x = i => value(data.cases[i], 'measured_step_s'), y = i => value(data.cases[i], 'predicted_step_s');
    const sizes = [...new Set(cases.map(i => value(data.cases[i], 'world_size')))].sort((a, b) => a - b);
    const low = Math.min(...cases.map(i => Math.min(x(i), y(i)))) / 1.25, high = Math.max(...cases.map(i => Math.max(x(i), y(i)))) * 1.25;
    const style = i => { const k = sizes.indexOf(value(data.cases[i], 'world_size')); return { shape: kShapes[k % kShapes.length], colour: 'var(--c' + k % 10 + ')' }; };
    const box = el('div');
    node.append(el('h3', {}, 'Step time of every case'), el('p', { class: 'note' }, 'Both axes are logarithmic; the band is ±10 %. Above the line the prediction was too slow.'), box,
      el('ul', { class: 'legend' }, sizes.map((s, k) => el('li', {}, svg('svg', { width: 14, height: 14, style: 'display:inline-block;vertical-align:-2px;margin-right:4px', 'aria-hidden': 'true' }, fill(kShapes[k % kShapes.length](7, 7, 5), { fill: 'var(--c' + k % 10 + ')' }, [])), s + (s === 1 ? ' rank' : ' ranks')))));
    const draw = width => {
      const w = Math.min(width, 640), h = Math.min(w, 460), pad = { l: 78, r: 12, t: 10, b: 44 };
      const px = v => pad.l + (w - pad.l - pad.r) * Math.log(v / low) / Math.log(high / low), py = v => h - pad.b - (h - pad.t - pad.b) * Math.log(v / low) / Math.log(high / low);
      const out = svg('svg', { width: w, height: h, viewBox: `0 0 ${w} ${h}`, role: 'group', 'aria-label': 'Predicted step time against measured step time, ' + cases.length + ' cases' });
      out.append(svg('clipPath', { id: 'plot' }, svg('rect', { x: pad.l, y: pad.t, width: w - pad.l - pad.r, height: h - pad.t - pad.b })));
      out.append(svg('polygon', { 'clip-path': 'url(#plot)', fill: 'var(--accent-soft)', points: [[low, low * 0.9], [high, high * 0.9], [high, high * 1.1], [low, low * 1.1]].map(p => px(p[0]) + ',' + py(p[1])).join(' ') }));
      let free = -Infinity;  // where the last label below the plot ends
      for (const t of logTicks(low, high)) {
        const label = trim(seconds(t)), half = 3.6 * label.length;
        out.append(svg('line', { class: 'grid', x1: px(t), x2: px(t), y1: pad.t, y2: h - pad.b }), svg('line', { class: 'grid', x1: pad.l, x2: w - pad.r, y1: py(t), y2: py(t) }));
        out.append(svg('text', { x: pad.l - 6, y: py(t) + 4, 'text-anchor': 'end' }, label));
        if (px(t) - half < free || px(t) + half > w) continue;
        out.append(svg('text', { x: px(t), y: h - pad.b + 16, 'text-anchor': 'middle' }, label));
        free = px(t) + half + 4;
      }
      out.append(svg('line', { class: 'axis', 'clip-path': 'url(#plot)', x1: px(low), y1: py(low), x2: px(high), y2: py(high) }));
      out.append(svg('text', { class: 'soft', x: (pad.l + w) / 2, y: h - 8, 'text-anchor': 'middle' }, 'measured step'), svg('text', { class: 'soft', x: -(h - pad.b) / 2, y: 13, 'text-anchor': 'middle', transform: 'rotate(-90)' }, 'predicted step'));
      for (const i of cases) {
        const c = data.cases[i], s = style(i);
        const text = titleOf(c) + '\nmeasured ' + seconds(x(i)) + ', predicted ' + seconds(y(i)) + '\nerror ' + signed(value(c, 'step_error_pct')) + ', spread ' + human(value(c, 'step_spread'), 'fraction');
        out.append(fill(s.shape(px(x(i)), py(y(i)), 5.5), { class: 'dot' + (i === state.selected ? ' selected' : ''), fill: s.colour, tabindex: 0, role: 'button', 'aria-label': text.replaceAll('\n', '; '), 'data-case': i, onclick: () => select(i),
          onkeydown: e => { if (e.key === 'Enter' || e.key === ' ') { e.preventDefault(); select(i); } }, onpointermove: e => showTip(text, e.clientX, e.clientY), onpointerleave: hideTip,
          onfocus: e => { const r = e.target.getBoundingClientRect(); showTip(text, r.right, r.bottom); }, onblur: hideTip }, []));
      }
      box.replaceChildren(out);
    };
    drawn(box, draw);
    state.onSelect.push(() => { for (const dot of box.querySelectorAll('.dot')) dot.classList.toggle('selected', +dot.dataset.case === state.selected); });
  }

  const kOpRows = 15;

  function opTable(node, indices) {
    let all = false;
    const box = el('div', { class: 'scroll tall', tabindex: 0, role: 'region', 'aria-label': 'Ops of the case' });
    const more = el('button', { type: 'button', onclick: () => { all = !all; draw(); } });
    const note = el('p', { class: 'note' });
    node.append(el('h3', {}, indices.some(i => value(data.cases[i], 'measured_step_s') !== null) ? 'Ops with the largest residuals' : 'Ops that take longest'), el('div', { class: 'bar' }, caseSelect('Case', indices), more), note, box);
    function draw() {
      const c = data.cases[state.selected];
      const ops = c ? c.ops : [];
      const measured = c && value(c, 'measured_step_s') !== null, predicted = c && value(c, 'predicted_step_s') !== null;
      const both = measured && predicted;
      const time = o => measured ? o[8] : o[7];
      const total = ops.reduce((sum, o) => sum + time(o), 0);
      const rows = [...ops].sort((a, b) => both ? Math.abs(b[8] - b[7]) - Math.abs(a[8] - a[7]) : time(b) - time(a));
      note.textContent = ops.length === 0 ? 'This case has no ops: it did not run.' : 'Seconds of one step of a rank of the stage; residual is measured minus predicted. All ops together: ' + seconds(total) + (both ? ', residuals ' + seconds(ops.reduce((sum, o) => sum + o[8] - o[7], 0)) : '') + '.';
      more.hidden = ops.length <= kOpRows;
      more.textContent = all ? 'Show the first ' + kOpRows : 'Show all ' + ops.length;
      const staged = ops.some(o => o[0] > 0);
      const head = ['op', ...(staged ? ['stage'] : []), 'predicted', 'measured', 'residual', 'of predicted', 'share', 'work'];
      const cell = t => el('td', { class: 'n' }, t);
      box.replaceChildren(el('table', {}, el('thead', {}, el('tr', {}, head.map((h, k) => el('th', { scope: 'col', class: k === 0 ? 'first' : h === 'share' ? '' : 'n' }, h)))),
        el('tbody', {}, rows.slice(0, all ? rows.length : kOpRows).map(o => {
          const relative = both && o[7] > 0 ? 100 * (o[8] - o[7]) / o[7] : null, share = total > 0 ? time(o) / total : 0;
          const work = o[4] > 0 ? human(o[4], 'flop') : o[6] > 0 ? bytes(o[6]) + ' sent' : bytes(o[5] || 0);
          const tipText = o[2] + ', ' + o[3] + ' a step\n' + count(o[4]) + ' flop, ' + bytes(o[5] || 0) + ' memory, ' + bytes(o[6] || 0) + ' payload';
          return el('tr', {}, el('td', { class: 'first', title: tipText }, o[1], el('span', { class: 'kind' }, ' ' + o[2])), staged ? cell(String(o[0])) : null, cell(predicted ? seconds(o[7]) : ''), cell(measured ? seconds(o[8]) : ''),
            cell(both ? seconds(o[8] - o[7]) : ''), el('td', { class: 'n' }, relative === null ? '' : signed(relative)),
            el('td', {}, el('span', { class: 'share', style: 'width:' + (4 * share).toFixed(2) + 'rem' }), ' ' + (100 * share).toFixed(1) + ' %'), cell(work));
        }))));
    }
    state.onSelect.push(draw);
    draw();
  }

  // ---- Losses ---------------------------------------------------------------------------------------------------------------

  function lossSection() {
    const groups = data.summary.losses;
    if (groups.length === 0) return;
    const node = section('losses', 'Losses of all layouts');
    const box = el('div'), spread = el('div'), note = el('p', { class: 'note' }), legend = el('ul', { class: 'legend' });
    let group = groups[0];
    const pick = el('select', { onchange: () => { group = groups[+pick.value]; refresh(); } }, groups.map((g, i) => el('option', { value: i }, g.label + ' (' + g.cases.length + ')')));
    if (groups.length > 1) node.append(el('div', { class: 'bar' }, el('label', {}, 'Run', pick)));
    node.append(note, box, legend, el('h3', {}, 'How far the curves lie apart'), el('p', { class: 'note' }, 'Largest less smallest loss over the layouts, by step.'), spread);
    const first = drawn(box, w => lossChart(box, group, w)), second = drawn(spread, w => spreadChart(spread, group, w));
    function refresh() {
      const g = group;
      note.textContent = g.label + '. ' + (g.cases.length === 1 ? 'One layout.' : g.largest_deviation === 0 ? 'The curves of all ' + g.cases.length + ' layouts are equal to the last bit over ' + g.steps + ' steps.' :
        'The curves of ' + g.cases.length + ' layouts deviate by at most ' + (g.largest_deviation === null ? 'a value that is not finite' : (g.largest_deviation < 1e-3 ? g.largest_deviation.toExponential(2) : g.largest_deviation.toPrecision(3))) + ' from one another over ' + g.steps + ' steps (at step ' + g.at_step + ').') +
        (g.unigram === null ? '' : ' The dashed line is the entropy of the unigram model, ' + g.unigram.toFixed(4) + ': what a model that only counts bytes reaches.');
      legend.replaceChildren(...g.cases.map((i, k) => el('li', {}, el('i', { style: 'background:var(--c' + k % 10 + ');height:.25rem;vertical-align:middle' }), nameOf(data.cases[i]))));
      first();
      second();
    }
    refresh();
  }

  /// Frame of a line chart over steps: axes, ticks, scales.
  function frame(width, height, steps, low, high, ticks, label, name) {
    const pad = { l: 58, r: 12, t: 10, b: 36 };
    const px = s => pad.l + (width - pad.l - pad.r) * (steps > 1 ? s / (steps - 1) : 0.5), py = v => height - pad.b - (height - pad.t - pad.b) * (v - low) / (high - low || 1);
    const out = svg('svg', { width, height, viewBox: `0 0 ${width} ${height}`, role: 'img', tabindex: 0, 'aria-label': name });
    for (const [v, text] of ticks) out.append(svg('line', { class: 'grid', x1: pad.l, x2: width - pad.r, y1: py(v), y2: py(v) }), svg('text', { x: pad.l - 6, y: py(v) + 4, 'text-anchor': 'end' }, text));
    for (const s of linearTicks(0, Math.max(1, steps - 1), width > 600 ? 10 : 5)) if (Number.isInteger(s)) out.append(svg('text', { x: px(s), y: height - pad.b + 16, 'text-anchor': 'middle' }, String(s)));
    out.append(svg('line', { class: 'axis', x1: pad.l, x2: width - pad.r, y1: height - pad.b, y2: height - pad.b }), svg('text', { class: 'soft', x: (pad.l + width) / 2, y: height - 4, 'text-anchor': 'middle' }, 'step'),
      svg('text', { class: 'soft', x: -(height - pad.b) / 2, y: 12, 'text-anchor': 'middle', transform: 'rotate(-90)' }, label));
    return { out, px, py, pad };
  }
  /// A cursor that follows pointer and arrow keys over `steps` positions and shows `text(step)`.
  function cursor(f, steps, height, text) {
    const line = svg('line', { class: 'axis', y1: f.pad.t, y2: height - f.pad.b, visibility: 'hidden' });
    f.out.append(line);
    let at = -1;
    const show = (s, e) => {
      at = Math.max(0, Math.min(steps - 1, s));
      for (const k of ['x1', 'x2']) line.setAttribute(k, f.px(at));
      line.setAttribute('visibility', 'visible');
      const r = f.out.getBoundingClientRect();
      showTip(text(at), e ? e.clientX : r.left + f.px(at), e ? e.clientY : r.top + 20);
    };
    const hide = () => { line.setAttribute('visibility', 'hidden'); hideTip(); };
    fill(f.out, { onpointermove: e => show(Math.round((e.clientX - f.out.getBoundingClientRect().left - f.px(0)) / ((f.px(1) - f.px(0)) || 1)), e), onpointerleave: hide, onblur: hide,
      onkeydown: e => { if (e.key === 'ArrowLeft' || e.key === 'ArrowRight') { e.preventDefault(); show(at + (e.key === 'ArrowLeft' ? -1 : 1)); } } }, []);
  }
  const path = points => points.reduce((d, p) => d + (p === null ? '' : (d === '' || d.endsWith(' ') ? 'M' : 'L') + p[0].toFixed(1) + ',' + p[1].toFixed(1)) + (p === null && !d.endsWith(' ') && d !== '' ? ' ' : ''), '');

  function lossChart(box, g, width) {
    const curves = g.cases.map(i => data.cases[i].losses);
    const steps = Math.max(...curves.map(c => c.length)), height = 320;
    const finite = curves.flat().filter(v => v !== null).concat(g.unigram === null ? [] : [g.unigram]);
    if (finite.length === 0) return box.replaceChildren(el('p', {}, 'No loss is finite.'));
    let low = Math.min(...finite), high = Math.max(...finite);
    const margin = (high - low || 1) * 0.06;
    low -= margin;
    high += margin;
    const f = frame(width, height, steps, low, high, linearTicks(low, high, 6).map(v => [v, String(+v.toPrecision(6))]), 'loss, nat', 'Loss by step of ' + g.cases.length + ' layouts');
    if (g.unigram !== null) f.out.append(svg('line', { x1: f.pad.l, x2: width - f.pad.r, y1: f.py(g.unigram), y2: f.py(g.unigram), stroke: 'var(--budget)', 'stroke-width': 1.5, 'stroke-dasharray': '6 4' }),
      svg('text', { x: width - f.pad.r - 4, y: f.py(g.unigram) - 6, 'text-anchor': 'end' }, 'unigram ' + g.unigram.toFixed(3)));
    curves.forEach((curve, k) => f.out.append(svg('path', { d: path(curve.map((v, s) => v === null ? null : [f.px(s), f.py(v)])), fill: 'none', stroke: 'var(--c' + k % 10 + ')', 'stroke-width': Math.max(1.2, 4 - 2.8 * k / Math.max(1, curves.length - 1)), 'stroke-linejoin': 'round' })));
    cursor(f, steps, height, s => {
      const here = curves.map((c, k) => [c[s], k]).filter(p => typeof p[0] === 'number').sort((a, b) => a[0] - b[0]);
      if (here.length === 0) return 'step ' + s + ': no finite loss';
      const [min, max] = [here[0], here[here.length - 1]];
      return 'step ' + s + '\nloss ' + min[0].toFixed(6) + (here.length > 1 ? ' to ' + max[0].toFixed(6) + '\nlowest ' + nameOf(data.cases[g.cases[min[1]]]) + ', highest ' + nameOf(data.cases[g.cases[max[1]]]) + '\napart by ' + (max[0] - min[0]).toExponential(2) : '');
    });
    box.replaceChildren(f.out);
  }

  function spreadChart(box, g, width) {
    const curves = g.cases.map(i => data.cases[i].losses), height = 170;
    const apart = Array.from({ length: g.steps }, (_, s) => { const here = curves.map(c => c[s]).filter(v => v !== null); return here.length === 0 ? 0 : Math.max(...here) - Math.min(...here); });
    const positive = apart.filter(v => v > 0);
    if (positive.length === 0) return box.replaceChildren(el('p', {}, g.cases.length === 1 ? 'There is one layout only.' : 'Nowhere: the losses of all layouts are equal to the last bit.'));
    const low = Math.floor(Math.log10(Math.min(...positive))), high = Math.max(low + 1, Math.ceil(Math.log10(Math.max(...positive))));
    const ticks = [];
    for (let e = low; e <= high; e += Math.max(1, Math.ceil((high - low) / 5))) ticks.push([e, '1e' + e]);
    const f = frame(width, height, apart.length, low, high, ticks, 'apart, nat', 'Largest difference of losses between layouts by step');
    apart.forEach((v, s) => { if (v > 0) f.out.append(svg('line', { x1: f.px(s), x2: f.px(s), y1: f.py(low), y2: f.py(Math.log10(v)), stroke: 'var(--c0)', 'stroke-width': Math.max(1, Math.min(8, 0.6 * (width - 70) / apart.length)) })); });
    cursor(f, apart.length, height, s => 'step ' + s + '\napart by ' + (apart[s] === 0 ? '0' : apart[s].toExponential(3)));
    box.replaceChildren(f.out);
  }

  // ---- Timeline -------------------------------------------------------------------------------------------------------------

  const kGroups = [
    ['matrix multiplication', /^linear/, '--c0'], ['attention', /^(attention|rope)/, '--c5'], ['norm, activation, residual', /^(norm|activation|residual|dropout|add|fill)/, '--c4'],
    ['embedding, loss', /^(embed|positions|cross_entropy|load_batch|sum_scalars|squared_norm)/, '--c3'], ['optimizer', /^(adamw|sgd)/, '--c2'],
    ['collective', /^(all_reduce|reduce_scatter|all_gather|broadcast|all_to_all)/, '--c1'], ['send, receive', /^(send|recv)/, '--c7'], ['other', /./, '--c6'],
  ];
  const groupOf = kind => { const k = kGroups.findIndex(g => g[1].test(kind)); return k < 0 ? kGroups.length - 1 : k; };
  const kStride = 5;  // numbers of one interval: op, begin, duration, wait for a peer (us), 1 for a wait

  function timelineSection() {
    const timelines = data.timelines.filter(t => t.lanes.length > 0);
    if (timelines.length === 0) return;
    const node = section('timeline', 'Timeline of one step', 'For each stream of each rank' + (data.cases.some(c => value(c, 'measured_step_s') !== null) ? ': measured above, predicted below' : ', as predicted') + '. Drag to move, Ctrl and wheel (or + and -) to zoom, arrow keys to move, 0 to see all. Hatched time is waiting.');
    const pick = el('select', { onchange: () => view.show(timelines[+pick.value]) }, timelines.map((t, i) => el('option', { value: i }, t.label)));
    const canvas = el('canvas', { tabindex: 0, role: 'img' });
    const range = el('span', { class: 'note' });
    const button = (text, label, act) => el('button', { type: 'button', 'aria-label': label, onclick: act }, text);
    const note = el('p', { class: 'note' });
    node.append(el('div', { class: 'bar' }, el('label', {}, 'Case', pick), button('+', 'Zoom in', () => view.zoom(0.5)), button('−', 'Zoom out', () => view.zoom(2)), button('◀', 'Earlier', () => view.pan(-0.25)),
      button('▶', 'Later', () => view.pan(0.25)), button('Whole step', 'Whole step', () => view.fit()), range), canvas,
      el('ul', { class: 'legend' }, kGroups.map(g => el('li', {}, el('i', { style: 'background:var(' + g[2] + ')' }), g[0])), el('li', {}, el('i', { class: 'hatch' }), 'waiting')), note);
    const view = timelineView(canvas, range, note);
    view.show(timelines[0]);
    drawn(node, () => view.draw());
    state.onSelect.push(() => {
      const i = timelines.findIndex(t => t.case_id === value(data.cases[state.selected], 'case_id'));
      if (i >= 0 && +pick.value !== i) { pick.value = i; view.show(timelines[i]); }
    });
  }

  function timelineView(canvas, range, note) {
    const row = 15, gap = 9, top = 24;
    let t = null, end = 1, from = 0, to = 1, groups = [], other = null;
    const gutter = () => canvas.clientWidth < 520 ? 64 : 128;
    const x = us => gutter() + (us - from) / (to - from) * (canvas.clientWidth - gutter());
    const sides = lane => [['measured', lane.measured], ['predicted', lane.predicted]];
    const rowTop = (k, s) => top + k * (2 * row + gap) + s * row;

    function show(timeline) {
      t = timeline;
      end = 0;
      for (const lane of t.lanes) for (const [, list] of sides(lane)) for (let i = 0; i < list.length; i += kStride) end = Math.max(end, list[i + 1] + list[i + 2]);
      groups = t.ops.map(op => groupOf(op[1]));
      other = t.lanes.map(lane => sides(lane).map(([, list]) => {
        const sums = new Map();
        for (let i = 0; i < list.length; i += kStride) if (list[i + 4] === 0) sums.set(list[i], (sums.get(list[i]) || 0) + list[i + 2] - list[i + 3]);
        return sums;
      }));
      canvas.setAttribute('aria-label', 'Timeline of ' + t.label + ', ' + t.lanes.length + ' streams, ' + seconds(end * 1e-6));
      note.textContent = (t.step >= 0 ? 'Measured is step ' + t.step + ', whose duration is the median. ' : '') + (t.left_out > 0 ? t.left_out.toLocaleString('en') + ' intervals ' + (t.shown_s > 0 ? 'from ' + seconds(t.shown_s) + ' on and of further ranks' : 'of further ranks') + ' are left out; the trace in the case\'s folder has them.' : '');
      fit();
    }
    function clamp() {
      const width = Math.max(end * 1e-5, Math.min(to - from, end * 1.02));
      from = Math.max(-0.01 * end, Math.min(from, 1.01 * end - width));
      to = from + width;
    }
    function fit() { from = 0; to = end * 1.01; draw(); }
    function zoom(factor, at) {
      const centre = at === undefined ? (from + to) / 2 : at;
      from = centre - (centre - from) * factor;
      to = centre + (to - centre) * factor;
      clamp();
      draw();
    }
    function pan(share) { const d = share * (to - from); from += d; to += d; clamp(); draw(); }

    /// Index of the first interval of `list` that ends after `us`. Intervals of one stream are in order.
    function firstVisible(list, us) {
      let a = 0, b = list.length / kStride;
      while (a < b) { const m = (a + b) >> 1; if (list[m * kStride + 1] + list[m * kStride + 2] < us) a = m + 1; else b = m; }
      return Math.max(0, a - 1) * kStride;
    }
    function hatched(g) {
      const tile = document.createElement('canvas');
      tile.width = tile.height = 6;
      const h = tile.getContext('2d');
      h.strokeStyle = css('--c6');
      h.lineWidth = 1.4;
      h.beginPath();
      for (const d of [-6, 0, 6]) { h.moveTo(d, 6); h.lineTo(d + 6, 0); }
      h.stroke();
      return g.createPattern(tile, 'repeat');
    }
    function drawLane(g, list, y, paint) {
      const right = canvas.clientWidth;
      let lastPixel = -1;
      g.font = '11px system-ui, "DejaVu Sans", sans-serif';
      for (let i = firstVisible(list, from); i < list.length && list[i + 1] < to; i += kStride) {
        const a = Math.max(gutter(), x(list[i + 1])), b = Math.min(right, x(list[i + 1] + list[i + 2]));
        if (b < gutter() || (b - a < 0.5 && Math.floor(a) === lastPixel)) continue;
        lastPixel = Math.floor(a);
        const wait = list[i + 4] === 1, w = Math.max(b - a, 0.7), inner = Math.max(0.7, w > 3 ? w - 0.6 : w);
        g.fillStyle = wait ? paint.hatch : paint.colours[groups[list[i]] ?? paint.colours.length - 1];
        g.fillRect(a, y, inner, row - 2);
        if (!wait && list[i + 3] > 0) {
          const p = Math.min(b, x(list[i + 1] + list[i + 3]));
          if (p - a > 1) { g.fillStyle = paint.card; g.fillRect(a, y, p - a, row - 2); g.fillStyle = paint.hatch; g.fillRect(a, y, p - a, row - 2); }
        }
        if (!wait && w > 46 && t.ops[list[i]]) {
          g.save();
          g.beginPath();
          g.rect(a, y, inner, row - 2);
          g.clip();
          g.fillStyle = paint.text;
          g.fillText(t.ops[list[i]][0].split(' ').slice(-2).join(' '), a + 4, y + row - 5);
          g.restore();
        }
      }
    }
    function draw() {
      if (t === null || canvas.clientWidth === 0) return;
      const width = canvas.clientWidth, height = top + t.lanes.length * (2 * row + gap) + 4, ratio = devicePixelRatio || 1;
      canvas.width = Math.round(width * ratio);
      canvas.height = Math.round(height * ratio);
      canvas.style.height = height + 'px';
      const g = canvas.getContext('2d');
      g.scale(ratio, ratio);
      const paint = { colours: kGroups.map(k => css(k[2])), hatch: hatched(g), card: css('--card'), text: isDark() ? '#111418' : '#ffffff' };
      const ink = css('--ink'), soft = css('--soft'), grid = css('--grid');
      g.fillStyle = paint.card;
      g.fillRect(0, 0, width, height);
      g.font = '12px system-ui, "DejaVu Sans", sans-serif';
      for (const tick of linearTicks(from, to, width > 700 ? 8 : 3)) {
        if (tick < from) continue;
        g.fillStyle = grid;
        g.fillRect(x(tick), top - 6, 1, height);
        g.fillStyle = soft;
        const text = trim(seconds(Math.max(0, tick) * 1e-6));
        if (x(tick) + g.measureText(text).width < width) g.fillText(text, x(tick) + 3, 14);
      }
      t.lanes.forEach((lane, k) => {
        const newRank = k === 0 || t.lanes[k - 1].rank !== lane.rank;
        if (newRank && k > 0) { g.fillStyle = css('--line'); g.fillRect(0, rowTop(k, 0) - gap / 2, width, 1); }
        g.fillStyle = ink;
        g.font = '12px system-ui, "DejaVu Sans", sans-serif';
        if (gutter() > 100) { g.fillText((newRank ? 'rank ' + lane.rank : ''), 6, rowTop(k, 0) + 12); g.fillStyle = soft; g.fillText(lane.stream, 58, rowTop(k, 0) + 12); }
        else { g.fillText(newRank ? 'r' + lane.rank : '', 4, rowTop(k, 0) + 12); g.fillStyle = soft; g.font = '11px system-ui, "DejaVu Sans", sans-serif'; g.fillText(lane.stream.slice(0, 8), 4, rowTop(k, 1) + 10); }
        sides(lane).forEach(([, list], s) => drawLane(g, list, rowTop(k, s), paint));
      });
      range.textContent = seconds(Math.max(0, from) * 1e-6) + ' to ' + seconds(Math.min(end, to) * 1e-6) + ' of ' + seconds(end * 1e-6);
    }

    /// The interval under a point, as {lane, side, at}, or null.
    function hit(px, py) {
      const k = Math.floor((py - top) / (2 * row + gap));
      if (k < 0 || k >= t.lanes.length || px < gutter()) return null;
      const s = Math.floor((py - rowTop(k, 0)) / row);
      if (s < 0 || s > 1) return null;
      const list = sides(t.lanes[k])[s][1], us = from + (px - gutter()) / (canvas.clientWidth - gutter()) * (to - from), slack = 1.5 * (to - from) / canvas.clientWidth;
      let best = null;
      for (let i = firstVisible(list, us - slack); i < list.length && list[i + 1] <= us + slack; i += kStride)
        if (list[i + 1] + list[i + 2] >= us - slack && (best === null || list[i + 4] <= list[best + 4])) best = i;
      return best === null ? null : { lane: k, side: s, at: best, list };
    }
    function describe(h) {
      const i = h.at, op = t.ops[h.list[i]], lane = t.lanes[h.lane], wait = h.list[i + 4] === 1;
      const lines = [(wait ? 'waits for: ' : '') + (op ? op[0] : 'no op'), 'rank ' + lane.rank + ', ' + lane.stream + ', ' + sides(lane)[h.side][0] + ' at ' + seconds(h.list[i + 1] * 1e-6)];
      if (wait) return lines.concat('waiting ' + seconds(h.list[i + 2] * 1e-6)).join('\n');
      const [m, p] = [other[h.lane][0].get(h.list[i]), other[h.lane][1].get(h.list[i])];
      if (op) lines.push(op[1] + ': ' + count(op[2]) + ' flop, ' + bytes(op[3] || 0) + ' memory' + (op[4] > 0 ? ', ' + bytes(op[4]) + ' payload' : ''));
      lines.push('measured ' + (m === undefined ? 'none' : seconds(m * 1e-6)) + ', predicted ' + (p === undefined ? 'none' : seconds(p * 1e-6)));
      if (m !== undefined && p > 0) lines.push('residual ' + seconds((m - p) * 1e-6) + ' (' + signed(100 * (m - p) / p) + ')');
      if (h.list[i + 3] > 0) lines.push('and ' + seconds(h.list[i + 3] * 1e-6) + ' waiting for a peer');
      return lines.join('\n');
    }
    let drag = null;
    fill(canvas, {
      onwheel: e => { if (!e.ctrlKey && !e.metaKey) return; e.preventDefault(); zoom(e.deltaY > 0 ? 1.25 : 0.8, from + (e.offsetX - gutter()) / (canvas.clientWidth - gutter()) * (to - from)); },
      onpointerdown: e => { drag = { x: e.clientX, from, to }; canvas.setPointerCapture(e.pointerId); },
      onpointerup: () => { drag = null; }, onpointercancel: () => { drag = null; }, onpointerleave: hideTip,
      onpointermove: e => {
        if (drag) {
          const d = (drag.x - e.clientX) / (canvas.clientWidth - gutter()) * (drag.to - drag.from);
          from = drag.from + d;
          to = drag.to + d;
          clamp();
          draw();
          return hideTip();
        }
        const h = hit(e.offsetX, e.offsetY);
        if (h) showTip(describe(h), e.clientX, e.clientY); else hideTip();
      },
      onkeydown: e => {
        const act = { ArrowLeft: () => pan(-0.1), ArrowRight: () => pan(0.1), a: () => pan(-0.1), d: () => pan(0.1), '+': () => zoom(0.7), '=': () => zoom(0.7), w: () => zoom(0.7), '-': () => zoom(1.4), s: () => zoom(1.4), 0: fit, Home: fit }[e.key];
        if (act && !e.ctrlKey && !e.metaKey) { e.preventDefault(); act(); }
      },
    }, []);
    return { show, draw, zoom, pan, fit };
  }

  // ---- Environment ----------------------------------------------------------------------------------------------------------

  function environmentSection() {
    const m = data.metadata, node = section('environment', 'Where this comes from');
    const rows = [['command', m.command && el('code', {}, m.command)], ['date', m.date], ['shardlab', [m.program_version, m.commit].filter(Boolean).join(', commit ')], ['compiler', m.compiler], ['libraries', m.libraries],
      ['host', m.host], ['processor', m.processor && m.processor + (m.cores > 0 ? ', ' + m.cores + ' cores' : '')], ['memory', m.memory_bytes > 0 && bytes(m.memory_bytes)], ['system', m.system], ['calibration', m.calibration_id || 'none'],
      ['recorder', m.recorder_overhead_s > 0 && seconds(m.recorder_overhead_s) + ' an event'], ['dropped events', String(m.dropped_events)]];
    const kernels = [...new Set(data.cases.map(c => value(c, 'kernel_variant')).filter(Boolean))];
    if (kernels.length > 0) rows.push(['kernels', kernels.join(', ')]);
    const extrapolated = data.cases.filter(c => value(c, 'extrapolated') === true).length;
    if (data.cases.some(c => value(c, 'predicted_step_s') !== null)) rows.push(['predictions', !m.calibration_id ? 'come from data sheets, not from measured rates' : extrapolated === 0 ? 'interpolate their calibration in every case' : 'extrapolate beyond their calibration in ' + extrapolated + ' of ' + data.cases.length + ' cases']);
    node.append(el('dl', { class: 'env' }, rows.filter(r => r[1]).map(([k, v]) => [el('dt', {}, k), el('dd', {}, v)])),
      el('details', {}, el('summary', {}, 'What the columns mean'), el('dl', { class: 'env' }, data.columns.map(c => [el('dt', {}, c.name + (c.unit ? ', ' + c.unit : '')), el('dd', {}, c.help)]))));
  }

  // ---- Page -----------------------------------------------------------------------------------------------------------------

  function navigation() {
    const nav = document.getElementById('nav');
    nav.append(...[...document.querySelectorAll('main section')].map(s => el('a', { href: '#' + s.id }, s.querySelector('h2').textContent)));
    nav.hidden = false;
    const button = document.getElementById('theme'), root = document.documentElement;
    const name = () => { button.textContent = isDark() ? 'Light colours' : 'Dark colours'; };
    button.hidden = false;
    button.addEventListener('click', () => { root.dataset.theme = isDark() ? 'light' : 'dark'; name(); state.redraws.forEach(r => r()); });
    matchMedia('(prefers-color-scheme: dark)').addEventListener('change', () => { name(); state.redraws.forEach(r => r()); });
    name();
  }

  accuracy();
  unlucky();
  if (data.cases.length > 0) casesSection();
  memorySection();
  predictionSection();
  lossSection();
  timelineSection();
  environmentSection();
  navigation();
  document.addEventListener('keydown', e => { if (e.key === 'Escape') hideTip(); });
  document.documentElement.dataset.ready = 'true';
})();
