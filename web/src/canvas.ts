// Draws the tree on a canvas, which stays smooth with tens of thousands of nodes, and tells which
// node is under the pointer. Panning and zooming are d3-zoom's.
import { select } from "d3-selection";
import { linkHorizontal } from "d3-shape";
import { zoom, zoomIdentity, type ZoomBehavior, type ZoomTransform } from "d3-zoom";
import { number, percent, probability } from "./format";
import { HEADER, shortened, shownLabel, type Layout, type Placed } from "./layout";
import type { StepMass, TreeNode } from "./tree";

/** A run that is drawn, with its colour. */
export interface Shown {
  number: number;
  design: string;
  /** The design, and the prefix if one was forced. */
  name: string;
  colour: string;
  /** Probability kept and dropped at each step after its prefix. */
  masses: StepMass[];
  /** The length of the prefix that was forced. */
  after: number;
  /** The number of the last step. */
  last: number;
  /** How many of its runs are overlaid; 0 if none are. */
  overlaid: number;
  /** By the number of the output. */
  weights: Map<number, { pi: number | null; w: number | null }>;
}

export interface Picture {
  layout: Layout;
  shown: Shown[];
  outputs: { text: string; f: number | null }[];
  functionName: string;
  /** The step whose candidates are looked at; the last one shows the finished beam. */
  step: number;
  selected: TreeNode | null;
  scene: unknown;
}

export interface Listener {
  select(node: TreeNode | null): void;
  step(step: number): void;
}

interface Theme {
  background: string;
  text: string;
  faint: string;
  line: string;
  panel: string;
  dropped: string;
}

const FONT = "13px system-ui, sans-serif";
const SMALL = "11px system-ui, sans-serif";
const WIDEST_EDGE = 15;
/** The scale below which text cannot be read, and nodes are parts of lines. */
const READABLE = 0.45;
const BATCH = 100;
/** About how wide the numbers after a sequence are. */
const FIGURES = 200;

export class TreeCanvas {
  private readonly context: CanvasRenderingContext2D;
  private readonly behaviour: ZoomBehavior<HTMLCanvasElement, unknown>;
  private transform: ZoomTransform = zoomIdentity;
  private picture: Picture | null = null;
  private theme!: Theme;
  private width = 0;
  private height = 0;
  private frame = 0;
  private hovered: Placed | null = null;
  private moved = false;
  private scene: unknown;
  private readonly widths = new Map<string, number>();

  constructor(
    private readonly canvas: HTMLCanvasElement,
    private readonly listener: Listener,
  ) {
    this.context = canvas.getContext("2d")!;
    this.behaviour = zoom<HTMLCanvasElement, unknown>()
      .scaleExtent([0.03, 3])
      .on("zoom", (event: { transform: ZoomTransform; sourceEvent: unknown }) => {
        this.transform = event.transform;
        if (event.sourceEvent) this.moved = true;
        this.request();
      });
    select(canvas).call(this.behaviour).on("dblclick.zoom", null);
    canvas.addEventListener("pointermove", (event) => this.hover(event));
    canvas.addEventListener("pointerleave", () => this.setHovered(null));
    canvas.addEventListener("click", (event) => this.click(event));
    new ResizeObserver(() => this.resize()).observe(canvas);
    this.readTheme();
  }

  measure = (text: string): number => {
    let width = this.widths.get(text);
    if (width === undefined) {
      this.context.font = FONT;
      width = this.context.measureText(text).width;
      this.widths.set(text, width);
    }
    return width;
  };

  readTheme(): void {
    const style = getComputedStyle(this.canvas);
    const colour = (name: string) => style.getPropertyValue(`--${name}`).trim();
    this.theme = {
      background: colour("background"),
      text: colour("text"),
      faint: colour("faint"),
      line: colour("line"),
      panel: colour("panel"),
      dropped: colour("dropped"),
    };
    this.request();
  }

  /** Shows a picture, or nothing. */
  show(picture: Picture | null): void {
    if (picture !== null && picture.scene !== this.scene) this.moved = false;
    this.scene = picture?.scene;
    this.picture = picture;
    this.hovered = null;
    if (!this.moved) this.fitWidth();
    this.request();
  }

  /** Zooms so that sequences and their numbers are in view, as far as they can be read then. */
  fitWidth(): void {
    if (this.picture === null || this.width === 0) return;
    const { layout } = this.picture;
    const k = Math.min(1.1, Math.max(READABLE + 0.1, this.width / this.wide(layout)));
    this.moveTo(zoomIdentity.translate(12, HEADER).scale(k));
    this.moved = false;
  }

  private wide(layout: Layout): number {
    const perRun = this.picture!.shown.length > 1 ? 60 * this.picture!.shown.length : 0;
    return layout.columns.at(-1)! + layout.textWidth + FIGURES + perRun + 40;
  }

  /** Zooms so that the whole tree is in view. */
  fit(): void {
    if (this.picture === null || this.width === 0) return;
    const { layout } = this.picture;
    const k = Math.min(1.2, this.width / this.wide(layout), (this.height - HEADER) / layout.height);
    const free = this.height - HEADER - k * layout.height;
    this.moveTo(zoomIdentity.translate(12, HEADER + Math.max(0, Math.min(free / 2, 40))).scale(k));
    this.moved = false;
  }

  zoomBy(factor: number): void {
    this.behaviour.scaleBy(select(this.canvas), factor);
    this.moved = true;
  }

  /** Brings a node into view. */
  reveal(node: TreeNode): void {
    const placed = this.picture?.layout.byNode.get(node);
    if (placed === undefined) return;
    const [x, y] = this.transform.apply([placed.x + placed.width / 2, placed.y]);
    const inside = x > 40 && x < this.width - 80 && y > HEADER + 20 && y < this.height - 20;
    if (inside) return;
    const { k } = this.transform;
    const to = zoomIdentity.translate(this.width / 3, this.height / 2).scale(k);
    this.moveTo(to.translate(-placed.x, -placed.y));
    this.moved = true;
  }

  private moveTo(transform: ZoomTransform): void {
    this.behaviour.transform(select(this.canvas), transform);
  }

  private resize(): void {
    const { width, height } = this.canvas.getBoundingClientRect();
    const ratio = devicePixelRatio || 1;
    this.width = width;
    this.height = height;
    this.canvas.width = Math.round(width * ratio);
    this.canvas.height = Math.round(height * ratio);
    if (!this.moved) this.fitWidth();
    this.request();
  }

  private request(): void {
    if (this.frame === 0) {
      this.frame = requestAnimationFrame(() => {
        this.frame = 0;
        this.draw();
      });
    }
  }

  /** Draws everything that is in view; returns the time that it took, in milliseconds. */
  draw(): number {
    const began = performance.now();
    const { context, theme, picture } = this;
    const ratio = devicePixelRatio || 1;
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.fillStyle = theme.background;
    context.fillRect(0, 0, this.width, this.height);
    if (picture === null || picture.layout.placed.length === 0) return 0;
    const { x, y, k } = this.transform;
    context.setTransform(ratio * k, 0, 0, ratio * k, ratio * x, ratio * y);
    const top = (HEADER - y) / k - 30;
    const bottom = (this.height - y) / k + 30;
    const left = -x / k;
    const right = (this.width - x) / k;
    const readable = k > READABLE;
    this.drawEdges(picture, top, bottom, left, right, readable);
    for (const placed of readable ? picture.layout.placed : []) {
      if (placed.y < top || placed.y > bottom || placed.x > right) continue;
      if (placed.x + placed.width >= left) this.drawNode(placed, picture);
      if (placed.node.output !== null) this.drawOutput(placed, picture);
    }
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    this.drawHeader(picture);
    return performance.now() - began;
  }

  private drawEdges(
    picture: Picture,
    top: number,
    bottom: number,
    left: number,
    right: number,
    readable: boolean,
  ): void {
    const { context, theme } = this;
    const link = linkHorizontal<unknown, [number, number]>().context(context);
    const onPath = new Set<TreeNode>();
    for (let node = picture.selected; node !== null; node = node.parent) onPath.add(node);
    // Edges of the same width and colour are one path, because strokes are what takes time.
    const groups = new Map<string, Placed[]>();
    for (const placed of picture.layout.placed) {
      const { parent } = placed;
      if (parent === null) continue;
      if (Math.max(placed.y, parent.y) < top || Math.min(placed.y, parent.y) > bottom) continue;
      if (parent.x > right || placed.x < left) continue;
      const p = Number.isNaN(placed.node.logP) ? 0 : Math.exp(placed.node.logP);
      const least = readable ? 1 : 0.8 / this.transform.k;
      const width = Math.max(placed.kind === "lost" ? 0.6 : least, WIDEST_EDGE * p);
      const colour =
        placed.kind === "lost"
          ? theme.dropped
          : onPath.has(placed.node)
            ? theme.text
            : this.isAlive(placed.node, picture)
              ? this.edgeColour(placed.node, picture)
              : theme.faint;
      const key = `${Math.round(2 * width) / 2} ${colour}`;
      const group = groups.get(key);
      if (group === undefined) groups.set(key, [placed]);
      else group.push(placed);
    }
    for (const [key, group] of groups) {
      const at = key.indexOf(" ");
      context.lineWidth = Number(key.slice(0, at));
      context.strokeStyle = key.slice(at + 1);
      context.globalAlpha = group[0]!.kind === "lost" ? 0.6 : 0.55;
      // A path of thousands of edges is slow too, because its parts may overlap.
      for (let first = 0; first < group.length; first += BATCH) {
        context.beginPath();
        for (const { parent, x, y, width } of group.slice(first, first + BATCH)) {
          if (readable) {
            const from = parent!.x + (parent!.joined ? 6 : parent!.width);
            link({ source: [from, parent!.y], target: [x, y] });
          } else {
            context.moveTo(parent!.x + parent!.width, parent!.y);
            context.lineTo(x, y);
            context.lineTo(x + width, y);
          }
        }
        context.stroke();
      }
    }
    context.globalAlpha = 1;
  }

  private edgeColour(node: TreeNode, picture: Picture): string {
    const own = picture.shown.filter(({ number, design }) => node.kept.has(number) || node.drawn.has(design));
    return own.length === 1 ? own[0]!.colour : this.theme.line;
  }

  /** Whether something that extends the prefix is in a beam after the step that is looked at. */
  private isAlive(node: TreeNode, picture: Picture): boolean {
    if (node.kept.size === 0) return true; // it is known from overlaid runs only
    return picture.shown.some(({ number, last }) => {
      const seen = node.kept.get(number);
      return seen !== undefined && seen.until >= Math.min(picture.step, last);
    });
  }

  private drawNode(placed: Placed, picture: Picture): void {
    const { context, theme } = this;
    const { node, x, y, width, height } = placed;
    if (node.parent === null || placed.joined) {
      context.fillStyle = theme.text;
      context.beginPath();
      context.arc(x + 5, y, node.parent === null ? 5 : 2, 0, 2 * Math.PI);
      context.fill();
      return;
    }
    const isSelected = node === picture.selected;
    if (placed.kind === "lost") {
      context.font = SMALL;
      context.fillStyle = isSelected || placed === this.hovered ? theme.text : theme.dropped;
      context.textBaseline = "middle";
      context.fillText(`${shownLabel(node)}  ${probability(node.logP)}`, x + 3, y);
      if (isSelected) this.outline(placed, width + 60);
      return;
    }
    const alive = this.isAlive(node, picture);
    context.globalAlpha = alive ? 1 : 0.45;
    context.beginPath();
    context.roundRect(x, y - height / 2, width, height, 6);
    context.fillStyle = theme.panel;
    context.fill();
    // One stripe for each design, filled as far as its inclusion probability goes.
    const runs = picture.shown;
    context.save();
    context.clip();
    runs.forEach((run, i) => {
      const share = shareOf(node, run);
      if (share === null) return;
      context.fillStyle = run.colour;
      context.globalAlpha = (alive ? 0.5 : 0.2) * (runs.length > 1 ? 1.3 : 1);
      const stripe = height / runs.length;
      context.fillRect(x, y - height / 2 + i * stripe, Math.max(2, width * Math.min(1, share)), stripe);
    });
    context.restore();
    context.lineWidth = 1;
    context.strokeStyle = this.edgeColour(node, picture);
    context.stroke();
    context.font = node.isEnd ? SMALL : FONT;
    context.fillStyle = node.isEnd ? theme.faint : theme.text;
    context.textBaseline = "middle";
    context.fillText(shownLabel(node), x + 7, y + 0.5);
    context.globalAlpha = 1;
    if (!alive && this.diesNow(node, picture)) {
      context.fillStyle = theme.text;
      context.font = SMALL;
      context.fillText("✕", x + width + 4, y + 0.5);
    }
    if (isSelected || placed === this.hovered) this.outline(placed, width);
  }

  /** Whether the prefix was in a beam until just before the step that is looked at. */
  private diesNow(node: TreeNode, picture: Picture): boolean {
    return [...node.kept.values()].some((seen) => seen.until === picture.step - 1);
  }

  private outline({ x, y, height }: Placed, width: number): void {
    const { context, theme } = this;
    context.beginPath();
    context.roundRect(x - 2, y - height / 2 - 2, width + 4, height + 4, 8);
    context.strokeStyle = theme.text;
    context.lineWidth = 2;
    context.stroke();
  }

  private drawOutput(placed: Placed, picture: Picture): void {
    const { context, theme } = this;
    const { node, y } = placed;
    const output = picture.outputs[node.output!]!;
    const start = picture.layout.columns.at(-1)!;
    const from = placed.x + placed.width + 6;
    if (start > from) {
      context.strokeStyle = theme.line;
      context.globalAlpha = 0.5;
      context.lineWidth = 1;
      context.setLineDash([1, 4]);
      context.beginPath();
      context.moveTo(from, y);
      context.lineTo(start - 6, y);
      context.stroke();
      context.setLineDash([]);
      context.globalAlpha = 1;
    }
    let x = start;
    for (const run of picture.shown) {
      const inBeam = run.weights.has(node.output!);
      context.beginPath();
      context.arc(x + 5, y, 4, 0, 2 * Math.PI);
      context.fillStyle = context.strokeStyle = run.colour;
      context.lineWidth = 1;
      if (inBeam) context.fill();
      else context.stroke();
      x += 13;
    }
    context.font = FONT;
    context.textBaseline = "middle";
    context.fillStyle = theme.text;
    context.fillText(shortened(output.text), x + 4, y);
    const only = picture.shown.length === 1 ? picture.shown[0]! : null;
    const own = only?.weights.get(node.output!);
    const parts = [`p ${probability(node.logP)}`];
    if (only !== null && only.overlaid > 0) {
      parts.push(`in ${percent((node.drawn.get(only.design) ?? 0) / only.overlaid)}`);
    }
    if (own !== undefined) parts.push(`π ${number(own.pi)}`, `w ${number(own.w)}`);
    if (output.f !== null) parts.push(`${picture.functionName} ${number(output.f)}`);
    context.font = SMALL;
    context.fillStyle = theme.faint;
    x += 18 + picture.layout.textWidth;
    context.fillText(parts.join("   "), x, y);
    if (only !== null) return;
    x += 155;
    for (const run of picture.shown) {
      const weight = run.weights.get(node.output!);
      context.fillStyle = run.colour;
      if (weight !== undefined) context.fillText(`w ${number(weight.w)}`, x, y);
      x += 60;
    }
  }

  /** The numbers of the steps, with the shares of the probability that each kept and dropped. */
  private drawHeader(picture: Picture): void {
    const { context, theme, transform } = this;
    context.fillStyle = theme.background;
    context.globalAlpha = 0.94;
    context.fillRect(0, 0, this.width, HEADER);
    context.globalAlpha = 1;
    context.strokeStyle = theme.line;
    context.lineWidth = 1;
    context.beginPath();
    context.moveTo(0, HEADER - 0.5);
    context.lineTo(this.width, HEADER - 0.5);
    context.stroke();
    context.font = SMALL;
    context.textBaseline = "middle";
    const { columns } = picture.layout;
    let lastLabel = -Infinity;
    for (let step = 1; step < columns.length - 1; step++) {
      const x = transform.applyX(columns[step]!);
      const width = transform.k * (columns[step + 1]! - columns[step]!) - 6;
      if (x + width < 0 || x > this.width) continue;
      const current = step === picture.step;
      if (x > lastLabel + 22) {
        context.fillStyle = current ? theme.text : theme.faint;
        context.font = current ? `bold ${SMALL}` : SMALL;
        context.fillText(String(step), x + 2, 9);
        lastLabel = x;
      }
      picture.shown.forEach(({ masses, after, colour }, i) => {
        const mass = masses[step - 1 - after];
        if (mass === undefined) return;
        const stripe = 20 / picture.shown.length;
        const y = 18 + i * stripe;
        context.fillStyle = theme.dropped;
        context.globalAlpha = 0.35;
        context.fillRect(x, y, width, stripe - 1);
        context.globalAlpha = 1;
        context.fillStyle = colour;
        context.fillRect(x, y, (width * mass.kept) / (mass.kept + mass.dropped), stripe - 1);
      });
      if (current) {
        context.strokeStyle = theme.text;
        context.strokeRect(x - 2, 15, width + 4, 25);
      }
    }
  }

  private at(event: { offsetX: number; offsetY: number }): Placed | null {
    if (this.picture === null) return null;
    const [x, y] = this.transform.invert([event.offsetX, event.offsetY]);
    const end = this.picture.layout.columns.at(-1)!;
    return (
      this.picture.layout.placed.find((placed) => {
        const reach = placed.kind === "lost" ? placed.width + 60 : placed.width;
        if (Math.abs(y - placed.y) > placed.height / 2 + 1) return false;
        if (x >= placed.x && x <= placed.x + reach) return true;
        return placed.node.output !== null && x >= end && x <= end + this.picture!.layout.textWidth + FIGURES;
      }) ?? null
    );
  }

  private hover(event: PointerEvent): void {
    if (event.buttons === 0) this.setHovered(this.at(event));
  }

  private setHovered(placed: Placed | null): void {
    if (placed === this.hovered) return;
    this.hovered = placed;
    this.canvas.style.cursor = placed === null ? "grab" : "pointer";
    this.request();
  }

  private click(event: MouseEvent): void {
    if (event.offsetY < HEADER && this.picture !== null) {
      const x = this.transform.invertX(event.offsetX);
      const { columns } = this.picture.layout;
      const step = columns.findIndex((begin, i) => i > 0 && x < (columns[i + 1] ?? Infinity) && x >= begin);
      if (step > 0 && step < columns.length - 1) this.listener.step(step);
      return;
    }
    this.listener.select(this.at(event)?.node ?? null);
  }
}

/** How far a node is filled: as often as it was drawn, or its inclusion probability. */
export function shareOf(node: TreeNode, run: Shown): number | null {
  if (run.overlaid > 0) {
    const drawn = node.drawn.get(run.design);
    return drawn === undefined ? null : drawn / run.overlaid;
  }
  const seen = node.kept.get(run.number);
  if (seen === undefined) return null;
  return seen.pi ?? 1;
}
