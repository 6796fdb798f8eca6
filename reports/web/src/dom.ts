// Elements of the page. Text reaches the page as text nodes and attributes only, never as markup.

export type Child = Node | string | number | null | undefined | false | Child[];
export type Attributes = Record<string, unknown>;

function fill<E extends Element>(node: E, attributes: Attributes | null, children: Child[]): E {
  for (const [key, value] of Object.entries(attributes ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith('on')) node.addEventListener(key.slice(2), value as EventListener);
    else node.setAttribute(key, value === true ? '' : String(value));
  }
  append(node, children);
  return node;
}

export function append(node: Element, children: Child): void {
  if (Array.isArray(children)) for (const child of children) append(node, child);
  else if (children instanceof Node) node.append(children);
  else if (children !== null && children !== undefined && children !== false) node.append(String(children));
}

/// An HTML element. Attributes that begin with "on" are listeners; null, undefined and false attributes are left out.
export function el<K extends keyof HTMLElementTagNameMap>(tag: K, attributes: Attributes | null = null, ...children: Child[]): HTMLElementTagNameMap[K] {
  return fill(document.createElement(tag), attributes, children);
}

/// An SVG element.
export function svg<K extends keyof SVGElementTagNameMap>(tag: K, attributes: Attributes | null = null, ...children: Child[]): SVGElementTagNameMap[K] {
  return fill(document.createElementNS('http://www.w3.org/2000/svg', tag), attributes, children);
}

export function byId(id: string): HTMLElement {
  const node = document.getElementById(id);
  if (node === null) throw new Error('no element #' + id);
  return node;
}

/// A labelled select of [value, text] pairs.
export function select(label: string, options: [string, string][], value: string, change: (value: string) => void): HTMLLabelElement {
  const box = el('select', { onchange: () => change(box.value) }, options.map(([v, text]) => el('option', { value: v, selected: v === value }, text)));
  return el('label', {}, el('span', {}, label), box);
}

// ---- The tip at the pointer ---------------------------------------------------------------------------------------------------

export function showTip(lines: string[], x: number, y: number): void {
  const tip = byId('tip');
  tip.replaceChildren(...lines.map((line, i) => el(i === 0 ? 'strong' : 'span', {}, line)));
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  tip.style.left = Math.max(4, Math.min(x + 14, innerWidth - box.width - 6)) + 'px';
  tip.style.top = (y + 18 + box.height > innerHeight ? Math.max(4, y - box.height - 10) : y + 16) + 'px';
}

export function hideTip(): void {
  byId('tip').hidden = true;
}
