# SPDX-License-Identifier: Apache-2.0
"""The same mistakes as they are spelled with the Trainer of Transformers and its callbacks."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from ddpilot.lint.program import argument, is_constant
from ddpilot.lint.rule import Facts, Report, rule
from ddpilot.lint.rules.checkpoints import saved_by_all_ranks
from ddpilot.lint.rules.models import is_wrapped_here
from ddpilot.lint.rules.processes import device_uses

_TRAINERS = (
    "transformers.Trainer",
    "transformers.Seq2SeqTrainer",
    "transformers.trainer.Trainer",
    "transformers.trainer_seq2seq.Seq2SeqTrainer",
    "trl.SFTTrainer",
)
_CALLBACKS = ("transformers.TrainerCallback", "transformers.trainer_callback.TrainerCallback")
_ARGUMENTS = ("transformers.TrainingArguments", "transformers.Seq2SeqTrainingArguments", "trl.SFTConfig")
_RUN_ON_ALL_RANKS = (".evaluate", ".predict", ".train")
_SAVED_BY_TRAINER = ("_save", "save_model", "_save_checkpoint")
"""Methods that the Trainer itself calls on one rank."""
_IN_RANKS = re.compile(
    r"local_rank|\bRANK\b|world_size|is_world_process_zero|is_local_process_zero|torchrun|torch\.distributed"
    r"|DistributedDataParallel|main_process_first|n_gpu|notebook_launcher|CUDA_VISIBLE_DEVICES", re.IGNORECASE
)  # fmt: skip
"""Words of programs that run in several ranks: a Trainer alone also runs in one process."""
_LAUNCHED = re.compile(r"LOCAL_RANK|local_rank|WORLD_SIZE|torchrun|notebook_launcher|init_process_group|subprocess")
_GLOBAL_BATCH = re.compile(r"(?:global|total|effective|overall)_?(?:train_?)?batch", re.IGNORECASE)
_COUNTS_RANKS = re.compile(r"world|n_gpu|num_gpu|num_proc|device_count|\.train_batch_size")


def _is_trained(facts: Facts) -> bool:
    """True if the file makes a Trainer or a callback of one, for a job of several ranks."""
    program = facts.program
    if "transformers" not in program.imports or not _IN_RANKS.search(program.text):
        return False
    classes = program.nodes[ast.ClassDef]
    return bool(program.calls_to(*_TRAINERS)) or any(_extends(facts, e, (*_TRAINERS, *_CALLBACKS)) for e in classes)


def _extends(facts: Facts, node: ast.AST | None, names: tuple[str, ...]) -> bool:
    """True if `node` is a class with a base of one of `names`."""
    return isinstance(node, ast.ClassDef) and any(facts.program.name_of(base) in names for base in node.bases)


def _is_trainer(facts: Facts, node: ast.expr) -> bool:
    """True for a Trainer, and for `self` in a subclass of it."""
    program = facts.program
    if program.is_made_by(node, *_TRAINERS):
        return True
    return isinstance(node, ast.Name) and node.id == "self" and _extends(facts, program.class_of(node), _TRAINERS)


@rule("DDP220")
def trainer_on_some_ranks(facts: Facts) -> Iterator[Report]:
    """`evaluate`, `predict` or `train` of a Trainer under a condition on the rank."""
    for call in facts.program.calls_to(*_RUN_ON_ALL_RANKS) if _is_trained(facts) else ():
        assert isinstance(call.func, ast.Attribute)
        guard = facts.flow.rank_guard(call)
        if guard is not None and guard.kind == "condition" and _is_trainer(facts, call.func.value):
            yield Report(call, f"`{call.func.attr}` gathers from all ranks, and only some of them call it here")


@rule("DDP603")
def trainer_save_on_all_ranks(facts: Facts) -> Iterator[Report]:
    """A callback, or the code around a Trainer, saves on every rank."""
    program = facts.program
    if not _is_trained(facts) or (facts.wraps and facts.inits):
        return
    saves = [(call, argument(call, 1, "f")) for call in program.calls_to("torch.save")]
    for call in program.calls_to(".save_pretrained"):
        is_model = "model" in ast.unparse(call.func)
        if is_model and not any(each.arg in ("is_main_process", None) for each in call.keywords):
            saves.append((call, argument(call, 0, "save_directory")))
    for call, path in saves:
        function = program.function_of(call)
        name = getattr(function, "name", "")
        is_event = name.startswith("on_") and _extends(facts, program.class_of(call), _CALLBACKS)
        if name not in _SAVED_BY_TRAINER:
            yield from saved_by_all_ranks(facts, call, path, is_called=is_event)


@rule("DDP337")
def trainer_gets_wrapper(facts: Facts) -> Iterator[Report]:
    """A model that the Trainer of Transformers wraps is wrapped by hand."""
    program = facts.program
    if "transformers" not in program.imports:
        return
    message = "the Trainer wraps the model itself: give it the plain model"
    for call in program.calls_to(*_TRAINERS):
        model = argument(call, 0, "model")
        if model is not None and is_wrapped_here(facts, model):
            yield Report(call, message)
    for node in program.nodes[ast.Assign]:
        assert isinstance(node, ast.Assign)
        for target in node.targets:
            is_model = isinstance(target, ast.Attribute) and target.attr in ("model", "model_wrapped")
            is_own = isinstance(target, ast.Attribute) and _is_trainer(facts, target.value)
            if is_model and is_own and is_wrapped_here(facts, node.value):
                yield Report(node, message)


@rule("DDP330")
def trainer_of_several_gpus(facts: Facts) -> Iterator[Report]:
    """A Trainer that sees several GPUs in one process, where it uses `nn.DataParallel`."""
    program = facts.program
    if "transformers" not in program.imports or _LAUNCHED.search(program.text):
        return
    for node in program.nodes[ast.Assign]:
        assert isinstance(node, ast.Assign)
        is_visible = any("CUDA_VISIBLE_DEVICES" in ast.unparse(each) for each in node.targets)
        if is_visible and isinstance(node.value, ast.Constant) and "," in str(node.value.value):
            for call in program.calls_to(*_TRAINERS)[:1]:
                yield Report(call, "with several GPUs in one process the Trainer uses `nn.DataParallel`: use torchrun")
            return


@rule("DDP414")
def batch_of_all_ranks(facts: Facts) -> Iterator[Report]:
    """A Trainer gets the batch of all ranks as that of one, or steps are counted as if there were one rank."""
    program = facts.program
    if not _is_trained(facts):
        return
    for call in program.calls_to(*_ARGUMENTS):
        size = argument(call, -1, "per_device_train_batch_size")
        if isinstance(size, (ast.Name, ast.Attribute)) and _GLOBAL_BATCH.search(ast.unparse(size)):
            yield Report(size, f"`{ast.unparse(size)}` is the batch of one rank here: divide it by their number")
    for node in program.nodes[ast.BinOp]:
        assert isinstance(node, ast.BinOp)
        is_quotient = isinstance(node.op, (ast.Div, ast.FloorDiv)) and "len(" in ast.unparse(node.left)
        is_of_one = "per_device_train_batch_size" in ast.unparse(node.right)
        if is_quotient and is_of_one and not _COUNTS_RANKS.search(ast.unparse(program.statement_of(node))):
            yield Report(node, "these are the steps of one rank: divide by the number of ranks, too")


@rule("DDP118")
def trainer_device(facts: Facts) -> Iterator[Report]:
    """A subclass or callback of a Trainer moves tensors to the first GPU by itself."""
    program = facts.program
    for node in device_uses(program) if _is_trained(facts) and not facts.is_distributed else ():
        is_own = _extends(facts, program.class_of(node), (*_TRAINERS, *_CALLBACKS))
        if is_own and is_constant(node, "cuda:0"):
            yield Report(node, "every rank uses the same GPU (cuda:0): use `self.args.device`")
