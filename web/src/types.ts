// The JSON that cpsbs.explore.record writes; the field names are the same there.

/** What a token adds to the text, or its bytes if these are no UTF-8 by themselves. */
export type Piece = string | number[];

/** In the place of a token: a sequence that had ended, offered or kept as it is. */
export const ITSELF = -1;

export const FORMAT = "cpsbs-explore";
export const VERSION = 1;

export interface Scene {
  text: string;
  k: number;
  temperature: number;
  nucleus: number | null;
  max_length: number;
  function: string;
  argument: string;
}

export interface Candidates {
  parent: number[];
  token: number[];
  log_p: number[];
  pi: (number | null)[];
}

export interface Step extends Candidates {
  count: number[];
  done: boolean[];
  lost: Candidates;
  log_rest: (number | null)[];
}

export interface Estimate {
  function: string;
  value: number | null;
  standard_error: number | null;
  interval_95: [number | null, number | null];
  bounds: [number | null, number | null] | null;
  exact: boolean;
  distinct: number;
  effective_size: number;
  captured: number;
  sum_of_weights: number;
  line: string;
  warning: string | null;
}

export interface Run {
  design: string;
  seed: number | null;
  distinct: boolean;
  estimates: boolean;
  prefix: number[];
  log_prefix: number;
  y: number[];
  count: number[];
  pi: (number | null)[];
  w: (number | null)[];
  steps: Step[] | null;
  estimate: Estimate | null;
}

export interface Output {
  tokens: number[];
  text: string;
  log_p: number;
  finished: boolean;
  f: number | null;
}

export interface Exact {
  low: number | null;
  high: number | null;
  captured: number;
  sequences: number;
}

export interface Document {
  format: string;
  version: number;
  /** The name of the model that drew. */
  model: string;
  /** What the model was given: the text, or a conversation. */
  prompt: string | Record<string, unknown>[];
  scene: Scene;
  pieces: Record<string, Piece>;
  /** The tokens that end a sequence. */
  ends: number[];
  outputs: Output[];
  runs: Run[];
  exact: Exact | null;
}

export interface Design {
  name: string;
  summary: string;
  distinct: boolean;
  estimates: boolean;
  tells_error: boolean;
  needs_joint: boolean;
}

/** What the page is served with. */
export interface Data {
  cpsbs: string;
  mode: "file" | "server";
  designs: Design[];
  model: string;
  /** The arguments of cpsbs.load. */
  load: Record<string, string | boolean>;
  seed: number;
  chosen: string[];
  scenes?: Scene[];
  documents?: Document[];
}
