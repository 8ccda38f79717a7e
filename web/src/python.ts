// "Copy as Python": code that gives the same sequences as the run on the page.
import type { Design, Scene } from "./types";

const FUNCTIONS: Record<string, (argument: string) => string> = {
  entropy: () => "cpsbs.functions.Entropy()",
  length: () => "cpsbs.functions.Length()",
  bleu: (argument) => `cpsbs.functions.Bleu([${literal(argument)}])`,
  chrf: (argument) => `cpsbs.functions.Chrf([${literal(argument)}])`,
  contains: (argument) =>
    `cpsbs.functions.Probability(lambda text: ${literal(argument)} in text, "contains")`,
};

export interface Source {
  /** The arguments of cpsbs.load, by name. */
  load: Record<string, string | boolean>;
  prompt: string | Record<string, unknown>[];
  scene: Scene;
  design: Design;
  seed: number;
}

export function asPython({ load, prompt, scene, design, seed }: Source): string {
  const { name, ...others } = load;
  const loading = [
    literal(String(name)),
    ...Object.entries(others).map(([key, value]) => `${key}=${python(value)}`),
  ];
  const given = typeof prompt === "string" ? literal(prompt) : JSON.stringify(prompt);
  const options = [
    `k=${scene.k}`,
    `design=${literal(design.name)}`,
    `max_length=${scene.max_length}`,
    `temperature=${scene.temperature}`,
    ...(scene.nucleus === null ? [] : [`nucleus=${scene.nucleus}`]),
    `seed=${seed}`,
    ...(design.needs_joint && scene.k > 1 ? ["joint=True"] : []),
  ];
  const f = FUNCTIONS[scene.function]!(scene.argument);
  return [
    "import cpsbs",
    "",
    `model = cpsbs.load(${loading.join(", ")})`,
    "beams = model.beams(",
    `    [${given}],`,
    ...options.map((option) => `    ${option},`),
    ")",
    "for row in beams.to_rows(model.texts(beams)):",
    `    print(f"{row['p']:.4f}  {row['text']}")`,
    `print(cpsbs.estimate(beams, ${f}, decode=model.decode))`,
    "",
  ].join("\n");
}

function python(value: string | boolean): string {
  return typeof value === "string" ? literal(value) : value ? "True" : "False";
}

/** A string as Python writes it; its escapes are those of JSON. */
function literal(text: string): string {
  return JSON.stringify(text);
}
