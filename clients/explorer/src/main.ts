/** Shows what the file contains, or asks the server that the page comes from. */

import { byId } from "./elements.js";
import { embedded } from "./embedded.js";
import { Explorer } from "./explorer.js";
import { RequestForm } from "./request.js";

const explorer = new Explorer();
const answers = embedded(byId("answers", HTMLScriptElement).textContent);
if (answers.length > 0) explorer.show(answers);
else
  new RequestForm((found) => {
    explorer.show(found);
  }).start();
