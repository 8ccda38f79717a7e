// Numbers as people read them.

export function number(value: number | null | undefined, digits = 3): string {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e5 || size < 1e-4) return value.toExponential(1).replace("e", " e");
  return String(Number(value.toPrecision(digits)));
}

export function probability(logP: number | null | undefined): string {
  if (logP === null || logP === undefined) return "–";
  if (logP > Math.log(1e-4)) return number(Math.exp(logP));
  const exponent = Math.floor(logP / Math.LN10);
  const mantissa = Math.exp(logP - exponent * Math.LN10);
  return `${mantissa.toFixed(1)} e${exponent}`;
}

export function percent(share: number): string {
  if (share > 0 && share < 0.001) return "<0.1%";
  return `${Number((100 * share).toPrecision(3))}%`;
}

export function plural(count: number, one: string, many = `${one}s`): string {
  return `${count.toLocaleString("en")} ${count === 1 ? one : many}`;
}

/** What the functions of a sequence are called on the page. */
export const FUNCTION_NAMES: Record<string, string> = {
  entropy: "−log p",
  length: "length",
  bleu: "BLEU",
  chrf: "chrF",
  contains: "contains",
};
