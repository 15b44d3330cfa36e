# SPDX-License-Identifier: Apache-2.0
"""A function of a notebook's cell is spawned: the child has another `__main__`."""

# without: error
# finding: DDP112

import multiprocessing
import sys
import types

notebook = types.ModuleType("__main__")  # as a kernel's: without a file
exec("def train(): print('training')", vars(notebook))
sys.modules["__main__"] = notebook
child = multiprocessing.get_context("spawn").Process(target=notebook.train)
child.start()
child.join()
sys.exit(child.exitcode)
