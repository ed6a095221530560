/** Packs masks into the bits that requests carry. */

import { create } from "@bufbuild/protobuf";

import { invalid } from "./errors.js";
import {
  AttentionMask_Kind as Kind,
  AttentionMaskSchema,
  type AttentionMask,
} from "./generated/attention/v1/attention_pb.js";
import type { Mask } from "./values.js";

/** Rows of one sequence: as the caller gave it, and those that are sent. */
export interface Rows {
  readonly given: number;
  readonly valid: number;
}

/** The query and key rows that a mask covers. */
export interface Extent {
  readonly query: Rows;
  readonly key: Rows;
}

/** Packs the masks of all sequences, eight elements to a byte, the first in the lowest bit. */
export function packMasks(masks: readonly Mask[], extents: readonly (Extent | undefined)[]): AttentionMask {
  if (masks.length !== extents.length) {
    throw invalid("mask", `as many masks as sequences, ${extents.length}`, masks.length);
  }
  const kinds = new Set(masks.map(kindOf));
  const heads = new Set(masks.map((mask) => mask.heads));
  const [kind] = kinds;
  if (kinds.size !== 1 || heads.size !== 1) {
    throw invalid("mask", "masks of the same axes and the same number of heads", "several");
  }
  const elements = masks.flatMap((mask, index) => validElements(mask, extents[index]));
  const bits = new Uint8Array(Math.ceil(elements.length / 8));
  elements.forEach((allowed, index) => {
    if (allowed) bits[index >> 3] = (bits[index >> 3] ?? 0) | (1 << (index & 7));
  });
  return create(AttentionMaskSchema, { kind: kind ?? Kind.UNSPECIFIED, bits });
}

function kindOf(mask: Mask): Kind {
  if (mask.queryRows === undefined) return Kind.KEYS;
  return mask.heads === undefined ? Kind.PAIRS : Kind.HEADS;
}

/** The elements of a mask without the rows and columns of padding. */
function validElements(mask: Mask, extent: Extent | undefined): boolean[] {
  const { heads = 1, queryRows = 1, keyRows, data } = mask;
  checkSize(mask, extent);
  const rows = mask.queryRows === undefined ? 1 : (extent?.query.valid ?? queryRows);
  const columns = extent?.key.valid ?? keyRows;
  const elements: boolean[] = [];
  for (let head = 0; head < heads; head++) {
    for (let row = 0; row < rows; row++) {
      const start = (head * queryRows + row) * keyRows;
      for (let column = 0; column < columns; column++) elements.push(Boolean(data[start + column]));
    }
  }
  return elements;
}

function checkSize(mask: Mask, extent: Extent | undefined): void {
  const { heads, queryRows, keyRows, data } = mask;
  const size = (heads ?? 1) * (queryRows ?? 1) * keyRows;
  if (heads !== undefined && queryRows === undefined) throw invalid("mask", "queryRows beside heads", "none");
  if (data.length !== size) throw invalid("mask", `${size} elements, as its sizes state`, data.length);
  if (extent === undefined) return;
  if (keyRows !== extent.key.given) throw invalid("mask", `${extent.key.given} keyRows`, keyRows);
  if (queryRows !== undefined && queryRows !== extent.query.given) {
    throw invalid("mask", `${extent.query.given} queryRows`, queryRows);
  }
}
