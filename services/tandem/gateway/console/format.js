// Formats quantities for people, with about three significant digits and the unit.

export const NONE = "–";

export function ms(value) {
  if (value === null || value === undefined) return NONE;
  if (value >= 60000) return `${(value / 60000).toFixed(1)} min`;
  if (value >= 10000) return `${(value / 1000).toFixed(1)} s`;
  if (value >= 1000) return `${(value / 1000).toFixed(2)} s`;
  if (value >= 100) return `${value.toFixed(0)} ms`;
  if (value >= 10) return `${value.toFixed(1)} ms`;
  return `${value.toFixed(2)} ms`;
}

export function count(value) {
  if (value === null || value === undefined) return NONE;
  for (const [size, unit] of [[1e9, "G"], [1e6, "M"], [1e4, "k"]]) {
    if (value >= size) {
      const scaled = value / (unit === "k" ? 1e3 : size);
      return `${scaled.toFixed(scaled < 10 ? 2 : scaled < 100 ? 1 : 0)}${unit}`;
    }
  }
  return Math.round(value).toLocaleString("en-US");
}

export function rate(value) {
  if (value === null || value === undefined) return NONE;
  if (value === 0) return "0";
  return value < 10 ? value.toFixed(value < 1 ? 2 : 1) : count(value);
}

export function bytes(value) {
  for (const [size, unit] of [[2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]]) {
    if (value >= size) return `${(value / size).toFixed(value >= 100 * size ? 0 : 1)} ${unit}`;
  }
  return `${Math.round(value)} B`;
}

export const percent = (share) => (share === null ? NONE : `${(100 * share).toFixed(share > 0 && share < 0.1 ? 1 : 0)} %`);

export const clock = (seconds) => new Date(1000 * seconds).toLocaleTimeString([], { hour12: false });

export const moment = (seconds) => new Date(1000 * seconds).toLocaleString([], { hour12: false });

export function span(seconds) {
  if (seconds < 60) return `${Math.round(seconds)} s`;
  if (seconds < 3600) return `${Math.round(seconds / 60)} min`;
  if (seconds < 86400) return `${(seconds / 3600).toFixed(1)} h`;
  return `${(seconds / 86400).toFixed(1)} d`;
}

export const plural = (number, noun) => `${count(number)} ${noun}${number === 1 ? "" : "s"}`;

/* Splits "fallback;reason=no_room;retries=1" into its kind, "fallback", and the other facts as text. */
export function path(text) {
  const [kind, ...facts] = text.split(";");
  return { kind, facts: facts.map((fact) => fact.replace("=", " ").replaceAll("_", " ")).join(", ") };
}
