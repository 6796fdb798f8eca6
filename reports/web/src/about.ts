// 7. Where all this comes from: assumptions, machine, versions, command, the whole case, the words.
import type { Report } from './data';
import { el, type Child } from './dom';
import { section } from './figure';
import { bytes, seconds } from './format';
import type { State } from './state';

const kGlossary: [string, string][] = [
  ['rank', 'one worker of the job: a device, or a set of threads on a CPU'], ['layout', 'how a case spreads work and state over ranks'], ['dp, tp, pp, cp, ep', 'ranks along the axes of data, tensor, pipeline, context and expert parallelism'],
  ['zero', 'stage of ZeRO: 1 shards the optimizer’s state, 2 gradients too, 3 parameters too'], ['micro-batch', 'sequences that go through the model together; a step accumulates the gradients of several'],
  ['stage', 'consecutive layers on a rank of the pipeline'], ['F, I, W, B', 'forward; backward for the input, for the weights, both'], ['bubble', 'time in which a stage waits for its turn'],
  ['exposed', 'with no compute beside it'], ['recompute', 'forward again within backward, to save the memory of activations'], ['MFU', 'model flop utilisation: the model’s flops, recompute not counted, against the peak of the precision'],
  ['peak', 'the largest sum of live bytes of a rank'], ['arena', 'the block of memory in which a rank’s buffers are packed'], ['wire bytes', 'what ranks really send in a step, all ranks together'],
  ['predicted, measured, residual', 'from the simulator; from a run; measured minus predicted'], ['unplanned', 'time or memory that no op and no buffer of the plan accounts for'], ['Pareto front', 'cases that no other beats in both measures'],
];

export function aboutSection(report: Report, state: State): void {
  const m = report.doc.metadata, node = section('environment', 'Where this comes from');
  const text = (key: string): string => String(m[key] ?? '');
  const rows: [string, Child][] = [['command', text('command') !== '' && el('code', {}, text('command'))], ['sweep', text('sweep')], ['date', text('date')], ['shardlab', [text('program_version'), text('commit')].filter(v => v !== '').join(', commit ')], ['compiler', text('compiler')], ['libraries', text('libraries')],
    ['host', text('host')], ['processor', text('processor') !== '' && `${text('processor')}${Number(m.cores) > 0 ? `, ${m.cores} cores` : ''}`], ['memory', Number(m.memory_bytes) > 0 && bytes(Number(m.memory_bytes))], ['system', text('system')], ['calibration', text('calibration_id') || 'none'],
    ['recorder', Number(m.recorder_overhead_s) > 0 && seconds(Number(m.recorder_overhead_s)) + ' an event'], ['dropped events', text('dropped_events')]];
  if (report.count > 0) {
    const distinct = (name: string): string => report.column(name).distinct().filter(v => v !== null && v !== '').join(', ');
    rows.push(['models', distinct('model')], ['machines', distinct('machine')], ['devices', distinct('device')], ['frameworks', distinct('profile')], ['kernels', distinct('kernel_variant')]);
    const extrapolated = report.column('extrapolated'), n = Array.from({ length: report.count }, (_, i) => extrapolated.at(i)).filter(v => v === true).length;
    if (report.column('predicted_step_s').used) rows.push(['predictions', text('calibration_id') === '' ? 'come from data sheets (the peak rates that a device’s maker publishes, of which programs reach a stated share) and published tables, not from measured rates of this machine' + (n > 0 ? `; ${n} of ${report.count} cases rest on rates of other devices` : '') : n === 0 ? 'interpolate their calibration in every case' : `extrapolate beyond their calibration in ${n} of ${report.count} cases`]);
    if (report.doc.price.note !== '') rows.push(['price', report.doc.price.note]);
  }
  node.append(el('dl', { class: 'env' }, rows.filter(r => r[1] !== false && r[1] !== '').map(([k, v]) => [el('dt', {}, k), el('dd', {}, v)])));
  if (Object.values(report.doc.details).some(d => d.yaml !== undefined)) {
    const pre = el('pre', { tabindex: 0, role: 'region', 'aria-label': 'The selected case as YAML' }), name = el('span', {});
    const draw = (): void => { pre.textContent = report.detail(state.selected)?.yaml ?? 'This page has the YAML of some cases only; case.yaml in the case’s folder has it.'; name.textContent = report.short(state.selected); };
    state.whenSelected(draw);
    draw();
    node.append(el('details', {}, el('summary', {}, 'The selected case, whole: ', name), pre));
  }
  node.append(el('details', {}, el('summary', {}, 'Words'), el('dl', { class: 'env' }, kGlossary.map(([k, v]) => [el('dt', {}, k), el('dd', {}, v)]))),
    el('details', {}, el('summary', {}, 'What the columns mean'), el('dl', { class: 'env' }, report.columns.filter(c => c.used).map(c => [el('dt', {}, c.name + (c.unit !== '' ? ', ' + c.unit : '')), el('dd', {}, c.help)]))));
}
