// The parts of a step: from ideal compute to the time that it takes. Parts of a case add up to its step.
import type { Report } from './data';

export interface Part { id: string; name: string; group: string; seconds: number; help: string }

interface Kind { name: string; group: string; help: string }
/// By the names that the data use (reports/waterfall.h).
const kKinds: Record<string, Kind> = {
  ideal: { name: 'ideal compute', group: 'ideal', help: "the model's floating-point operations at the device's peak" },
  recompute: { name: 'recompute', group: 'compute', help: 'forward again, to have activations back' },
  kernels: { name: 'kernel efficiency', group: 'compute', help: 'compute beyond the ideal: kernels that do not reach the peak, and ops that the ideal does not count' },
  launch: { name: 'launch', group: 'idle', help: 'the device waits for the host, or takes its time from one op to the next' },
  tensor: { name: 'tensor parallel', group: 'comm', help: 'exposed collectives of tensor and sequence parallelism' },
  context: { name: 'context parallel', group: 'comm', help: 'exposed exchange of keys and values' },
  expert: { name: 'expert parallel', group: 'comm', help: 'exposed exchange of tokens between experts' },
  data: { name: 'data parallel', group: 'comm', help: 'exposed reduction of gradients and gathering of weights' },
  pipeline: { name: 'pipeline sends', group: 'comm', help: 'exposed messages between stages' },
  bubble: { name: 'pipeline bubble', group: 'bubble', help: 'the stage waits for its turn' },
  copies: { name: 'exposed copies', group: 'copies', help: 'copies between memory spaces with nothing beside them' },
  update: { name: 'update', group: 'compute', help: 'optimizer, clipping and casts' },
  wait: { name: 'waiting', group: 'idle', help: 'waits for a peer or for another stream' },
  compute: { name: 'compute', group: 'compute', help: 'all compute, where the peak is not known' },
  communication: { name: 'exposed communication', group: 'comm', help: 'communication with no compute beside it' },
  unplanned: { name: 'unplanned', group: 'idle', help: 'in no op and no wait of the plan' },
};
export const kPartWords: Record<string, string> = {
  ideal: 'ideal compute', compute: 'compute beyond the ideal', comm: 'exposed communication', bubble: 'the pipeline bubble', copies: 'exposed copies', idle: 'idle time',
};
export const kGroupColour: Record<string, string> = { ideal: '--c0', compute: '--c4', comm: '--c1', bubble: '--c3', copies: '--c5', idle: '--c6' };

/// Null where nothing is known of the step.
export function partsOf(report: Report, i: number, measured: boolean): Part[] | null {
  const side = measured ? 'measured' : 'predicted', parts: Part[] = [];
  for (const id of report.doc.parts) {
    const kind = kKinds[id], seconds = report.num(i, side + '_part_' + id);
    if (kind !== undefined && seconds > 0) parts.push({ id, ...kind, seconds });
  }
  return parts.length > 0 ? parts : null;
}
export const partName = (id: string): string => kKinds[id]?.name ?? id;
