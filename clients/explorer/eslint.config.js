import { defineConfig } from "eslint/config";
import tseslint from "typescript-eslint";

export default defineConfig(
  { ignores: ["build/"] },
  tseslint.configs.strictTypeChecked,
  { languageOptions: { parserOptions: { project: ["./tsconfig.json"] } } },
  {
    rules: {
      "@typescript-eslint/restrict-template-expressions": ["error", { allowNumber: true }],
      "@typescript-eslint/no-floating-promises": [
        "error",
        { allowForKnownSafeCalls: [{ from: "package", name: "test", package: "node:test" }] },
      ],
    },
  },
  { files: ["*.js", "*.mjs"], extends: [tseslint.configs.disableTypeChecked] },
);
