// Makes elements and changes them only where something is new; never markup out of text.

const SVG = "http://www.w3.org/2000/svg";

export const byId = (id) => document.getElementById(id);

export function el(tag, facts = {}, ...children) {
  return fill(document.createElement(tag), facts, children);
}

export function svg(tag, facts = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), facts, children);
}

function fill(node, facts, children) {
  for (const [name, value] of Object.entries(facts)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

export function say(node, text) {
  const told = String(text);
  if (node.textContent !== told) node.textContent = told;
}

export function mark(node, name, value) {
  if (value === null || value === undefined || value === false) node.removeAttribute(name);
  else if (node.getAttribute(name) !== String(value)) node.setAttribute(name, String(value));
}

/* Widths are set by script, not by markup: the page's policy allows no style in it. */
export function width(node, share) {
  const wanted = `${(100 * Math.min(1, Math.max(0, share))).toFixed(2)}%`;
  if (node.style.width !== wanted) node.style.width = wanted;
}

const made = new WeakMap();

/* Brings the children of `parent` in line with `rows`: for each key `make` is called once, in this order, and returns
   parts, of which `node` is the child; `update` is called with them each time. */
export function sync(parent, rows, key, make, update) {
  if (!made.has(parent)) made.set(parent, new Map());
  const known = made.get(parent);
  const wanted = new Set();
  let place = parent.firstElementChild;
  for (const row of rows) {
    const name = key(row);
    wanted.add(name);
    if (!known.has(name)) known.set(name, make(row));
    const parts = known.get(name);
    update(parts, row);
    if (parts.node === place) place = place.nextElementSibling;
    else parent.insertBefore(parts.node, place);
  }
  for (const [name, { node }] of known) {
    if (!wanted.has(name)) {
      node.remove();
      known.delete(name);
    }
  }
}
