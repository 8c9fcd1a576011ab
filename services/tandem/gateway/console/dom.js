// Makes elements, and changes them only where a value is new. Text never becomes markup.

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

export function setText(node, text) {
  const value = String(text);
  if (node.textContent !== value) node.textContent = value;
}

export function mark(node, name, value) {
  if (value === null || value === undefined || value === false) node.removeAttribute(name);
  else if (node.getAttribute(name) !== String(value)) node.setAttribute(name, String(value));
}

/* Sets a width by script, because the page's Content Security Policy forbids style attributes in markup. */
export function width(node, share) {
  const value = `${(100 * Math.min(1, Math.max(0, share))).toFixed(2)}%`;
  if (node.style.width !== value) node.style.width = value;
}

const made = new WeakMap();

/* Makes the children of `parent` match `rows`, in their order. `make(row)` is called once for each new key and returns
   an object whose `node` is the child; `update(parts, row)` is called with that object each time. */
export function sync(parent, rows, key, make, update) {
  if (!made.has(parent)) made.set(parent, new Map());
  const known = made.get(parent);
  const present = new Set();
  let place = parent.firstElementChild;
  for (const row of rows) {
    const name = key(row);
    present.add(name);
    if (!known.has(name)) known.set(name, make(row));
    const parts = known.get(name);
    update(parts, row);
    if (parts.node === place) place = place.nextElementSibling;
    else parent.insertBefore(parts.node, place);
  }
  for (const [name, { node }] of known) {
    if (!present.has(name)) {
      node.remove();
      known.delete(name);
    }
  }
}
