// Bundles the page into src/cpsbs/explore/static: a script, a style sheet, and the licences of what
// the script contains. With --tests it bundles the unit tests for Node's test runner instead.
import { build } from "esbuild";
import { mkdir, readFile, readdir, writeFile } from "node:fs/promises";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";

const here = dirname(fileURLToPath(import.meta.url));
const target = join(here, "..", "src", "cpsbs", "explore", "static");

if (process.argv.includes("--tests")) {
  const tests = (await readdir(join(here, "tests"))).filter((name) => name.endsWith(".test.ts"));
  await build({
    stdin: {
      contents: tests.map((name) => `import "./tests/${name}";`).join("\n"),
      resolveDir: here,
    },
    outfile: join(here, ".build", "tests.mjs"),
    bundle: true,
    platform: "node",
    format: "esm",
    jsx: "automatic",
    jsxImportSource: "preact",
  });
} else {
  const result = await build({
    entryPoints: { page: join(here, "src", "main.tsx") },
    outdir: target,
    bundle: true,
    minify: true,
    format: "iife",
    target: ["es2022"],
    jsx: "automatic",
    jsxImportSource: "preact",
    legalComments: "none",
    charset: "utf8",
    metafile: true,
    supported: { "inline-script": false },
  });
  await mkdir(target, { recursive: true });
  await writeFile(join(target, "LICENSES.txt"), await licences(Object.keys(result.metafile.inputs)));
}

/** The licences of all packages that the bundle contains, as they ask for. */
async function licences(inputs) {
  const names = new Set(
    inputs.flatMap((name) => name.match(/node_modules\/((?:@[^/]+\/)?[^/]+)/)?.[1] ?? []),
  );
  const parts = [];
  for (const name of [...names].sort()) {
    const folder = join(here, "node_modules", name);
    const { version } = JSON.parse(await readFile(join(folder, "package.json"), "utf8"));
    const file = (await readdir(folder)).find((entry) => /^licen[sc]e/i.test(entry));
    if (!file) throw new Error(`${name} has no licence file`);
    parts.push(`${name} ${version}\n\n${await readFile(join(folder, file), "utf8")}`);
  }
  return parts.join(`\n${"-".repeat(72)}\n\n`);
}
