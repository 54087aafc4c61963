"""Print the path of the embedded default model's GGUF file, as `applianctl model add smollm2` finds it."""

import os

from appliance.library import resolve

print(resolve("smollm2", env=os.environ))
