// The state of the page, and everything that changes it.
import { ask, Stopped } from "./api";
import { FUNCTION_NAMES, plural } from "./format";
import { merged } from "./tree";
import {
  FORMAT,
  VERSION,
  type Candidates,
  type Data,
  type Design,
  type Document,
  type Run,
  type Scene,
  type Step,
} from "./types";

export type Tab = "sequences" | "step" | "redraws" | "estimate" | "designs";

export interface Busy {
  what: string;
  /** Between 0 and 1, or null if nobody knows. */
  progress: number | null;
}

/** A scene to choose, with the model that draws it. */
export interface Example {
  model: string;
  scene: Scene;
}

export interface State {
  scene: Scene;
  /** The model of the scene; that of the page, but for files of other models. */
  model: string;
  chosen: string[];
  seed: number;
  /** The step that is looked at; null for the finished beam. */
  step: number | null;
  /** How many dropped candidates are shown. */
  lost: number;
  /** Whether the runs of all seeds are laid over each other. */
  overlay: boolean;
  /** The prefix of the node that is selected, or null. */
  selected: string | null;
  tab: Tab;
  busy: Busy | null;
  message: { kind: "error" | "note"; text: string } | null;
}

/** The colours of Okabe and Ito, which people of all kinds of colour vision can tell apart. */
const COLOURS = [
  "#0072b2",
  "#d55e00",
  "#009e73",
  "#cc79a7",
  "#e69f00",
  "#56b4e9",
  "#8a6fdf",
  "#a6761d",
  "#7f7f7f",
];

export class Store {
  state: State;
  /** The scenes to choose from. */
  readonly examples: Example[];
  private readonly documents = new Map<string, Document>();
  private readonly listeners = new Set<() => void>();
  private running: AbortController | null = null;

  constructor(readonly data: Data) {
    for (const document of data.documents ?? []) this.keep(document);
    this.examples = [
      ...(data.scenes ?? []).map((scene) => ({ model: data.model, scene })),
      ...(data.documents ?? []),
    ];
    const { scene, model } = this.examples[0] ?? { scene: emptyScene(), model: data.model };
    this.state = {
      scene,
      model,
      chosen: data.chosen,
      seed: data.seed,
      step: null,
      lost: 40,
      overlay: false,
      selected: null,
      tab: "sequences",
      busy: null,
      message: null,
    };
  }

  subscribe(listener: () => void): () => void {
    this.listeners.add(listener);
    return () => this.listeners.delete(listener);
  }

  set(change: Partial<State>): void {
    this.state = { ...this.state, ...change };
    for (const listener of this.listeners) listener();
  }

  /** Whether the page can draw: it has a server, and that has the model of the scene. */
  get hasServer(): boolean {
    return this.data.mode === "server" && this.state.model === this.data.model;
  }

  /** All that was drawn for the present scene. */
  get document(): Document | null {
    return this.documents.get(keyOf(this.state.model, this.state.scene)) ?? null;
  }

  design(name: string): Design {
    const bare = name.replace(/\(.*/, "");
    return this.data.designs.find((design) => design.name === bare)!;
  }

  colour(name: string): string {
    const at = this.data.designs.indexOf(this.design(name));
    return COLOURS[at % COLOURS.length]!;
  }

  /** The numbers of the runs of the chosen designs with the present seed. */
  shownRuns(): number[] {
    return this.state.chosen.flatMap((name) => {
      const at = this.findRun(
        (run) => run.design === name && run.seed === this.state.seed && run.prefix.length === 0,
      );
      return at < 0 ? [] : [at];
    });
  }

  /** The numbers of the runs that go on from a prefix. */
  branches(): number[] {
    return (this.document?.runs ?? []).flatMap((run, i) => (run.prefix.length > 0 ? [i] : []));
  }

  /** The numbers of all runs of a design, whatever their seed. */
  runsOf(name: string): number[] {
    return (this.document?.runs ?? []).flatMap((run, i) =>
      run.design === name && run.prefix.length === 0 ? [i] : [],
    );
  }

  /** The seeds of which there is a run, in their order. */
  seeds(): number[] {
    const seeds = new Set(
      (this.document?.runs ?? []).flatMap(({ seed, prefix }) =>
        seed === null || prefix.length ? [] : [seed],
      ),
    );
    return [...seeds].sort((a, b) => a - b);
  }

  changeScene(change: Partial<Scene>): void {
    this.set({ scene: { ...this.state.scene, ...change }, selected: null, step: null });
  }

  /** Draws what is chosen and not there yet. */
  async draw(): Promise<void> {
    if (!this.hasServer) return;
    const { scene, seed } = this.state;
    const missing = this.state.chosen.filter(
      (name) =>
        this.findRun(
          (run) => run.design === name && run.seed === seed && !run.prefix.length && run.steps !== null,
        ) < 0,
    );
    if (missing.length === 0) return;
    await this.search(`Drawing with seed ${seed}`, async (signal) => {
      for (const [i, design] of missing.entries()) {
        await this.ask(
          "draw",
          { scene, design, seed },
          signal,
          (length) => (i + portion(length)) / missing.length,
        );
      }
    });
  }

  /** Draws with many seeds, from the present one on. */
  async redraw(count: number): Promise<void> {
    const { scene, seed, chosen } = this.state;
    this.set({ overlay: true, tab: "redraws" });
    if (!this.hasServer) return;
    await this.search(`Drawing with ${count} seeds`, async (signal) => {
      for (const [i, design] of chosen.entries()) {
        const known = new Set(this.runsOf(design).map((at) => this.document!.runs[at]!.seed));
        const seeds = Array.from({ length: count }, (_, j) => seed + j).filter((s) => !known.has(s));
        if (seeds.length === 0) continue;
        const there = count - seeds.length;
        const done = () => this.runsOf(design).length - known.size + there;
        await this.ask(
          "redraw",
          { scene, design, seeds },
          signal,
          () => (i + Math.min(1, done() / count)) / chosen.length,
        );
      }
    });
  }

  /** Goes on from a prefix, which need not have been kept. */
  async branch(prefix: number[]): Promise<void> {
    const { scene, seed, chosen } = this.state;
    await this.search("Drawing from that prefix", (signal) =>
      this.ask("draw", { scene, design: chosen[0], seed, prefix }, signal, portion),
    );
  }

  removeBranch(number: number): void {
    const document = this.document;
    if (document === null) return;
    this.documents.set(keyOf(this.state.model, this.state.scene), {
      ...document,
      runs: document.runs.filter((_, i) => i !== number),
    });
    this.set({ selected: null });
  }

  /** Draws until hardly anything is left. */
  async exact(): Promise<void> {
    const { scene } = this.state;
    await this.search("Drawing until hardly anything is left", (signal) =>
      this.ask("exact", { scene }, signal, () => null),
    );
  }

  stop(): void {
    this.running?.abort();
    this.running = null;
  }

  /** All that was drawn for the present scene, as a file. */
  save(): string | null {
    const document = this.document;
    return document === null ? null : JSON.stringify(document);
  }

  load(content: string): void {
    try {
      const document = checked(JSON.parse(content));
      this.keep(document);
      const designs = [...new Set(document.runs.map((run) => run.design))].filter((name) =>
        this.design(name),
      );
      if (
        !this.examples.some((one) => keyOf(one.model, one.scene) === keyOf(document.model, document.scene))
      ) {
        this.examples.push(document);
      }
      this.set({
        scene: document.scene,
        model: document.model,
        chosen: designs.length > 0 ? designs : this.state.chosen,
        seed: document.runs.find((run) => run.steps !== null)?.seed ?? document.runs[0]?.seed ?? 0,
        step: null,
        selected: null,
        overlay: false,
        message: {
          kind: "note",
          text: `Loaded ${plural(document.runs.length, "run")} of ${document.model}.`,
        },
      });
    } catch (error) {
      this.set({
        message: { kind: "error", text: `The file cannot be loaded: ${(error as Error).message}` },
      });
    }
  }

  private findRun(matches: (run: Run) => boolean): number {
    return (this.document?.runs ?? []).findIndex(matches);
  }

  private keep(document: Document): void {
    const key = keyOf(document.model, document.scene);
    this.documents.set(key, merged(this.documents.get(key) ?? null, document));
  }

  private ask(
    what: "draw" | "redraw" | "exact",
    body: unknown,
    signal: AbortSignal,
    progress: (length: number) => number | null,
  ): Promise<void> {
    return ask(
      what,
      body,
      {
        progress: (length) => {
          if (this.state.busy !== null && !signal.aborted) {
            this.set({ busy: { ...this.state.busy, progress: progress(length) } });
          }
        },
        document: (document) => {
          this.keep(document);
          this.set({});
        },
      },
      signal,
    );
  }

  /** Runs one search; the one before is stopped. */
  private async search(what: string, work: (signal: AbortSignal) => Promise<void>): Promise<void> {
    this.stop();
    const own = (this.running = new AbortController());
    this.set({ busy: { what, progress: 0 }, message: null });
    try {
      await work(own.signal);
    } catch (error) {
      if (this.running === own) {
        const kind = error instanceof Stopped ? "note" : "error";
        this.set({ message: { kind, text: (error as Error).message } });
      }
    } finally {
      if (this.running === own || this.running === null) this.set({ busy: null });
      if (this.running === own) this.running = null;
    }
  }
}

/** How far a search of that many tokens has come, if sequences had some thirty. */
function portion(length: number): number {
  return 1 - Math.exp(-length / 15);
}

export function keyOf(model: string, scene: Scene): string {
  return JSON.stringify([
    model,
    scene.text,
    scene.k,
    scene.temperature,
    scene.nucleus,
    scene.max_length,
    scene.function,
    scene.argument,
  ]);
}

function emptyScene(): Scene {
  return {
    text: "",
    k: 10,
    temperature: 1,
    nucleus: null,
    max_length: 128,
    function: "entropy",
    argument: "",
  };
}

/** A document that a person gave us; raises if it is none. */
export function checked(given: unknown): Document {
  const found = given as Partial<Document> | null;
  if (typeof found !== "object" || found === null || found.format !== FORMAT) {
    throw new Error("it was not saved by cpsbs explore");
  }
  if (found.version !== VERSION) {
    throw new Error(
      `its format has version ${String(found.version)}, and this page reads version ${VERSION}`,
    );
  }
  const { outputs, runs, pieces, scene } = found;
  const isList = (value: unknown, length?: number) =>
    Array.isArray(value) && (length === undefined || value.length === length);
  const whole =
    typeof found.model === "string" &&
    typeof scene?.text === "string" &&
    [scene.k, scene.temperature, scene.max_length].every((value) => typeof value === "number") &&
    FUNCTION_NAMES[scene.function] !== undefined &&
    typeof pieces === "object" &&
    pieces !== null &&
    isList(found.ends) &&
    isList(outputs) &&
    outputs!.every((output) => isList(output.tokens) && typeof output.text === "string") &&
    isList(runs) &&
    runs!.every(
      ({ y, count, pi, w, prefix, steps, design }) =>
        typeof design === "string" &&
        isList(prefix) &&
        isList(y) &&
        y.every((i) => Number.isInteger(i) && i >= 0 && i < outputs!.length) &&
        [count, pi, w].every((column) => isList(column, y.length)) &&
        (steps === null || (isList(steps) && steps.every(isStep))),
    );
  if (!whole) throw new Error("it is damaged");
  const runsWithAll = runs!.map((run) => ({ ...run, estimate: run.estimate ?? null }));
  return { ...(found as Document), runs: runsWithAll, exact: found.exact ?? null };
}

/** Whether the columns of a step have one entry for each candidate, with a parent that exists. */
function isStep(step: Step, i: number, steps: Step[]): boolean {
  const parents = i === 0 ? 1 : steps[i - 1]!.token.length;
  const columns = (part: Candidates, others: unknown[]) =>
    [part.token, part.parent, part.log_p, part.pi, ...others].every(
      (column) => Array.isArray(column) && column.length === part.token.length,
    ) && part.parent.every((parent) => Number.isInteger(parent) && parent >= 0 && parent < parents);
  return columns(step, [step.count, step.done]) && columns(step.lost, []) && Array.isArray(step.log_rest);
}
