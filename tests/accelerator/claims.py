# SPDX-License-Identifier: Apache-2.0
"""What the device `emu` promises, each as a function; `test_device.py` runs them in processes that have the device."""

from __future__ import annotations

import copy
import gc
import inspect
import io
import math
import os
import pickle
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 # as everybody calls it

Make = Callable[[], nn.Module]
Data = Callable[[], tuple[Tensor, Tensor]]


class TinyGPT(nn.Module):
    """One block of a language model: tokens (batch, length) to logits (batch * length, vocabulary)."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.tokens = nn.Embedding(17, 16)
        self.positions = nn.Embedding(12, 16)
        self.norm = nn.LayerNorm(16)
        self.attention = nn.Linear(16, 48)
        self.out = nn.Linear(16, 16)
        feed = [nn.LayerNorm(16), nn.Linear(16, 64), nn.GELU(), nn.Dropout(dropout), nn.Linear(64, 16)]
        self.feed = nn.Sequential(*feed)
        self.head = nn.Linear(16, 17)
        self.dropout = dropout

    def forward(self, tokens: Tensor) -> Tensor:
        batch, length = tokens.shape
        x = self.tokens(tokens) + self.positions(torch.arange(length, device=tokens.device))
        heads = [part.view(batch, length, 4, 4).transpose(1, 2) for part in self.attention(self.norm(x)).chunk(3, -1)]
        query, key, value = heads
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, dropout_p=self.dropout)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, 16))
        logits: Tensor = self.head(x + self.feed(x))
        return logits.flatten(0, 1)


def make_cnn() -> nn.Module:
    """Make a CNN with BatchNorm: images (batch, 3, 8, 8) to logits (batch, 4)."""
    first = [nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)]
    last = [nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)]
    return nn.Sequential(*first, *last)


def trained(device: str, make: Make, data: Data, optimizer: Callable[..., torch.optim.Optimizer]) -> list[Tensor]:
    """Train six steps in float64, and return the losses, parameters and buffers on the CPU."""
    torch.manual_seed(0)
    model = make().double().to(device)
    steps = optimizer(model.parameters(), lr=0.01)
    torch.manual_seed(1)
    losses = []
    for _ in range(6):
        x, y = data()
        steps.zero_grad()
        logits = model(x.to(device))
        loss = F.mse_loss(logits, y.to(device)) if y.is_floating_point() else F.cross_entropy(logits, y.to(device))
        loss.backward()  # type: ignore[no-untyped-call]
        steps.step()
        losses.append(loss.detach())
    return [value.detach().cpu().double() for value in (*losses, *model.parameters(), *model.buffers())]


def same_numbers(make: Make, data: Data) -> None:
    """Compare training on the device with training on the CPU, with SGD and with AdamW."""
    for optimizer in (torch.optim.SGD, torch.optim.AdamW):
        here = trained("cpu", make, data, optimizer)
        there = trained("emu", make, data, optimizer)
        worst = max(float((a - b).abs().max()) for a, b in zip(here, there, strict=True))
        assert worst < 1e-10, f"{optimizer.__name__}: {worst}"


def an_mlp_trains_with_the_cpus_numbers() -> None:
    """An MLP's losses and parameters equal the CPU's."""
    same_numbers(
        lambda: nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)),
        lambda: (torch.randn(32, 8, dtype=torch.float64), torch.randn(32, 1, dtype=torch.float64)),
    )


def a_cnn_trains_with_the_cpus_numbers() -> None:
    """A CNN's losses, parameters and running means equal the CPU's."""
    same_numbers(make_cnn, lambda: (torch.randn(8, 3, 8, 8, dtype=torch.float64), torch.randint(0, 4, (8,))))


def evaluation_and_empty_batches_have_the_cpus_numbers() -> None:
    """A CNN in eval mode, without running statistics too, and a mean over no rows with its gradient equal the CPU's."""
    x = torch.randn(4, 3, 8, 8, dtype=torch.float64)
    for track in (True, False):
        model = nn.Sequential(make_cnn(), nn.BatchNorm1d(4, track_running_stats=track)).double().eval()
        there = copy.deepcopy(model).to("emu")(x.to("emu"))
        assert float((model(x) - there.cpu()).abs().max()) < 1e-10, f"{track=}"
    weight = torch.ones(2, device="emu", requires_grad=True)
    loss = F.mse_loss(torch.zeros(0, 2, device="emu") * weight, torch.zeros(0, 2, device="emu"))
    loss.backward()  # type: ignore[no-untyped-call]
    assert loss.isnan()
    assert weight.grad is not None
    assert weight.grad.tolist() == [0.0, 0.0]


def a_gpt_trains_with_the_cpus_numbers() -> None:
    """A small GPT's losses and parameters equal the CPU's."""
    same_numbers(TinyGPT, lambda: (torch.randint(0, 17, (4, 12)), torch.randint(0, 17, (48,))))


def training_steps_make_no_host_wait() -> None:
    """A step on data that is on the device makes the host wait for nothing, whatever the optimizer's implementation."""
    x, y = torch.randn(8, 3, 8, 8, device="emu"), torch.zeros(8, dtype=torch.long, device="emu")
    choices: tuple[dict[str, Any], ...] = ({"foreach": True}, {"foreach": False}, {"fused": True})
    for chosen in choices:
        model = make_cnn().to("emu")
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, **chosen)
        emu().reset_host_syncs()
        for _ in range(2):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        assert emu().host_syncs() == {}, f"{chosen}: {emu().host_syncs()}"


def the_host_does_not_wait_for_an_operation() -> None:
    """An operation returns while the device still works at it, and synchronize waits for it."""
    gate = Gate()
    x = torch.ones(3, device="emu") + 1
    event = torch.Event(device="emu")
    event.record()
    assert not event.query()
    gate.open()
    torch.accelerator.synchronize()
    assert event.query()
    assert x.tolist() == [2, 2, 2]


class Gate:
    """Holds the device's current stream: everything enqueued after it waits until it is opened."""

    def __init__(self) -> None:
        self._opened = sys.modules["emu_C"].hold_stream(emu().current_device())

    def open(self) -> None:
        """Let the stream run."""
        self._opened()


def host_waits_are_counted_by_kind() -> None:
    """Each way to wait for the device has its own count."""
    x = torch.arange(4.0, device="emu")
    emu().reset_host_syncs()
    x.sum().item()
    x.cpu()
    torch.ones(2).to("emu")
    x.nonzero()
    torch.accelerator.synchronize()
    stream, event = torch.accelerator.current_stream(), torch.Event(device="emu")
    stream.synchronize()
    stream.record_event(event)
    event.synchronize()
    kinds = ("item", "copy to host", "copy to device", "data-dependent nonzero", "synchronize")
    assert emu().host_syncs() == dict.fromkeys((*kinds, "stream.synchronize", "event.synchronize"), 1)


def pinned_memory_is_marked_and_copied_without_waiting() -> None:
    """A copy between pinned memory and the device that may be non-blocking makes the host wait for nothing."""
    x = torch.arange(5.0)
    pinned = x.pin_memory()
    assert pinned.is_pinned()
    assert not x.is_pinned()
    assert torch.empty(3, pin_memory=True).is_pinned()
    emu().reset_host_syncs()
    back = pinned.to("emu", non_blocking=True).to("cpu", non_blocking=True)
    assert emu().host_syncs() == {}
    assert back.is_pinned()
    torch.accelerator.synchronize()
    assert torch.equal(back, x)
    emu().reset_host_syncs()
    x.to("emu").to("cpu")
    torch.empty(5).copy_(
        x.to("emu", non_blocking=True), non_blocking=True
    )  # the driver cannot leave before it is there
    assert emu().host_syncs() == {"copy to device": 1, "copy to host": 2}


def a_data_loader_pins_for_the_device() -> None:
    """A DataLoader with pin_memory gives pinned batches, with workers too."""
    data = torch.utils.data.TensorDataset(torch.randn(8, 2))
    for workers in (0, 1):
        for (batch,) in torch.utils.data.DataLoader(data, batch_size=4, pin_memory=True, num_workers=workers):
            assert batch.is_pinned()


def backward_runs_in_the_devices_own_thread() -> None:
    """The autograd engine has a thread per device, whose current device is that one."""
    seen: list[tuple[int, int]] = []

    class Look(torch.autograd.Function):
        """Note where backward runs."""

        @staticmethod
        def forward(_: Any, x: Tensor) -> Tensor:
            return x * 1

        @staticmethod
        def backward(_: Any, *grads: Tensor) -> Tensor:
            seen.append((threading.get_native_id(), emu().current_device()))
            return grads[0]

    for name in ("emu:0", "emu:1"):
        result: Tensor = Look.apply(torch.ones(2, device=name, requires_grad=True))  # type: ignore[no-untyped-call]
        result.sum().backward()  # type: ignore[no-untyped-call]
    assert [device for _, device in seen] == [0, 1]
    assert len({threading.get_native_id(), *(thread for thread, _ in seen)}) == 3


def streams_run_beside_each_other_and_events_order_them() -> None:
    """Work of a second stream is done while the first is held, and an event makes a stream wait for another."""
    gate = Gate()
    other, done = torch.Stream(device="emu"), torch.Event(device="emu")
    with other:
        assert torch.accelerator.current_stream() == other
        x = torch.full((3,), 2.0, device="emu") * 3
    other.synchronize()
    assert other.query()
    y = torch.ones(3, device="emu") + 1  # behind the gate
    done.record()
    other.wait_event(done)
    with other:
        z = y + x
    assert not other.query()
    gate.open()
    other.synchronize()
    assert z.tolist() == [8, 8, 8]


def events_measure_time() -> None:
    """Two events with timing give the milliseconds between them."""
    first, last = torch.Event(device="emu", enable_timing=True), torch.Event(device="emu", enable_timing=True)
    first.record()
    last.record()
    last.synchronize()
    assert first.elapsed_time(last) >= 0


def freed_memory_is_overwritten_unless_the_other_stream_was_recorded() -> None:
    """Memory that another stream still reads must be marked with record_stream, as on CUDA."""
    found = []
    for recorded in (False, True):
        gate = Gate()
        other = torch.Stream(device="emu")
        x = torch.ones(3, device="emu")
        made = torch.Event(device="emu")
        made.record()
        if recorded:
            x.record_stream(other)
        behind = torch.Event(device="emu")
        with other:
            other.wait_event(made)
            late = Gate()
            y = x + 1
        del x
        behind.record()
        gate.open()
        behind.synchronize()
        late.open()
        other.synchronize()
        found.append(bool(y.isnan().all()))
    assert found == [True, False]


def memory_is_counted() -> None:
    """Allocated bytes follow the tensors, the peak stays, and a cache is given back."""
    gc.collect()
    torch.accelerator.empty_cache()
    emu().reset_peak_memory_stats()
    before = emu().memory_allocated()
    x = torch.empty(1 << 20, device="emu")
    assert emu().memory_allocated() - before == 4 << 20
    del x
    assert emu().memory_allocated() == before
    assert emu().max_memory_allocated() - before == 4 << 20
    assert emu().memory_reserved() >= 4 << 20
    free, total = emu().mem_get_info()
    emu().empty_cache()
    assert emu().memory_reserved() == before
    assert emu().mem_get_info() == (free + (4 << 20), total)
    assert torch.accelerator.memory_allocated() == before


def a_full_device_raises_out_of_memory() -> None:
    """Beyond the limit there is a torch.OutOfMemoryError, after which the device works."""
    emu().set_memory_limit(8 << 20, 1)
    with pytest.raises(torch.OutOfMemoryError, match="emu out of memory. Tried to allocate 16 MiB"):
        torch.empty(4 << 20, device="emu:1")
    assert torch.ones(2, device="emu:1").sum().item() == 2
    emu().set_memory_limit(0, 1)


def random_states_are_saved_and_restored() -> None:
    """Seeds and states reproduce dropout, and neither makes the host wait."""
    model = TinyGPT(0.1).to("emu")
    tokens = torch.zeros(4, 12, dtype=torch.long, device="emu")
    emu().reset_host_syncs()
    state = emu().get_rng_state()
    first, second = model(tokens), model(tokens)
    emu().set_rng_state(state)
    again = model(tokens)
    assert emu().host_syncs() == {}
    assert torch.equal(first, again)
    assert not torch.equal(first, second)
    torch.manual_seed(3)
    one = torch.rand(3, device="emu")
    torch.manual_seed(3)
    assert torch.equal(one, torch.rand(3, device="emu"))
    with torch.random.fork_rng(devices=[0], device_type="emu"):
        two = torch.rand(3, device="emu")
    assert torch.equal(two, torch.rand(3, device="emu"))
    generator = torch.Generator("emu").manual_seed(1)
    assert torch.rand(3, generator=generator, device="emu").device.type == "emu"
    kept = F.dropout(torch.ones(10000, device="emu"), 0.3)
    assert abs(float((kept == 0).float().mean()) - 0.3) < 0.05
    assert math.isclose(float(kept.max()), 1 / 0.7, rel_tol=1e-6)


def tensors_are_saved_and_loaded() -> None:
    """Files, pickles and copies keep the device, and map_location changes it."""
    x = torch.arange(6.0, device="emu:1").view(2, 3)
    file = io.BytesIO()
    torch.save({"x": x, "row": x[1]}, file)
    for location, device in ((None, "emu:1"), ("cpu", "cpu"), ("emu:0", "emu:0")):
        file.seek(0)
        loaded = torch.load(file, map_location=location)
        assert str(loaded["x"].device) == device
        assert loaded["row"].tolist() == [3, 4, 5]
        assert loaded["row"].untyped_storage().data_ptr() == loaded["x"].untyped_storage().data_ptr()
    for twin in (pickle.loads(pickle.dumps(x)), copy.deepcopy(x), x.to("emu:0"), x.to("cpu")):
        assert twin.tolist() == x.tolist()
    assert x.untyped_storage().cpu().nbytes() == 24  # type: ignore[no-untyped-call]


def autocast_and_the_scaler_work() -> None:
    """Autocast computes in bfloat16 and float16, and a step with the scaler waits once, for what it found."""
    model = nn.Linear(4, 4).to("emu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("emu")
    x = torch.randn(2, 4, device="emu")
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("emu", dtype=dtype):
            y = model(x)
            assert F.softmax(y, 0).dtype == torch.float32
        assert y.dtype == dtype
        optimizer.zero_grad()
        emu().reset_host_syncs()
        scaler.scale(y.float().sum()).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        waits = emu().host_syncs()
        scaler.update()
        assert waits.get("item") == 1, waits
        assert "copy to host" not in waits, waits


def the_modules_functions_agree() -> None:
    """torch.accelerator and torch.emu name the same devices."""
    assert str(torch.accelerator.current_accelerator(check_available=True)) == "emu"
    assert torch.accelerator.device_count() == emu().device_count() == 2
    torch.accelerator.set_device_index(1)
    assert torch.ones(1, device="emu").device.index == emu().current_device() == 1
    with emu().device(0):
        assert torch.accelerator.current_device_index() == 0
    torch.accelerator.set_device_index(0)
    properties = [emu().get_device_properties(index) for index in range(2)]
    assert properties[0].uuid != properties[1].uuid
    assert properties[0].total_memory == emu().mem_get_info()[1]
    assert not emu().is_current_stream_capturing()
    assert emu().default_stream() == emu().current_stream()


def mistakes_are_refused_at_once() -> None:
    """Tensors of two devices and shapes that do not fit raise where they are used."""
    x = torch.ones(3, 4, device="emu")
    for call, text in (
        (lambda: x + torch.ones(3, 4), "found at least two devices, emu:0 and cpu"),
        (lambda: x + torch.ones(3, 4, device="emu:1"), "found at least two devices, emu:0 and emu:1"),
        (lambda: x @ x, "cannot be multiplied"),
        (lambda: x.numpy(), "can't convert emu:0 device type tensor to numpy"),
        (lambda: torch.ones(1, device="emu:2"), "invalid device ordinal"),
        (lambda: torch.empty(3, device="emu", pin_memory=True), "Only dense CPU tensors can be pinned"),
    ):
        with pytest.raises((RuntimeError, TypeError), match=text):
            call()


def recurrent_layers_have_the_cpus_numbers() -> None:
    """The outputs and gradients of LSTM and GRU, which use fused cells on an accelerator, equal the CPU's."""
    for make in (nn.LSTM, nn.GRU, nn.RNN):
        torch.manual_seed(0)
        layer, x = make(3, 4, num_layers=2).double(), torch.randn(5, 2, 3, dtype=torch.float64)
        found = []
        for device in ("cpu", "emu"):
            twin = copy.deepcopy(layer).to(device)
            outputs, last = twin(x.to(device))
            loss = torch.cat([outputs.flatten(), *(part.flatten() for part in last)]).square().sum()
            gradients = torch.autograd.grad(loss, list(twin.parameters()))
            found.append([outputs.detach().cpu(), *(gradient.cpu() for gradient in gradients)])
        assert max(float((a - b).abs().max()) for a, b in zip(*found, strict=True)) < 1e-10, make.__name__


def many_operations_work() -> None:
    """Indexing, sorting, views, random numbers, recurrent and other layers give the CPU's values or shapes."""
    x = torch.arange(12.0).view(3, 4)
    for name, call in OPERATIONS.items():
        here, there = call(x.clone()), call(x.clone().to("emu"))
        assert torch.allclose(here.double(), there.cpu().double(), atol=1e-5), name
    rows = torch.nn.Embedding(4, 4).to("emu")(torch.tensor([[1, 2, 3]], device="emu"))
    for layer in (nn.RNN(4, 4), nn.TransformerEncoderLayer(4, 2, batch_first=True)):
        result = layer.to("emu")(rows)
        (result[0] if isinstance(result, tuple) else result).sum().backward(retain_graph=True)
    x = x.to("emu")
    for draw in (x.exponential_, x.uniform_, x.normal_, x.random_, x.bernoulli_):
        draw()
    assert sorted(torch.randperm(5, device="emu").tolist()) == [0, 1, 2, 3, 4]
    assert torch.multinomial(torch.ones(4, device="emu"), 2).shape == (2,)


def _filled(x: Tensor) -> Tensor:
    x[x > 4] = 0
    return x


def _put(x: Tensor) -> Tensor:
    x[torch.tensor([0, 2])] = 7.0
    x.view(-1).index_add_(0, torch.tensor([0, 1], device=x.device), torch.ones(2, device=x.device))
    return x.scatter_(1, torch.zeros(3, 1, dtype=torch.long, device=x.device), 9.0)


def _resized(x: Tensor) -> Tensor:
    return x.resize_(5, 4)[:3]


def _out(x: Tensor) -> Tensor:
    result = torch.empty(0, device=x.device)
    torch.add(x, 1, out=result)
    return torch.mm(x, x.t(), out=result)


OPERATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "mask": lambda x: x[x > 4],
    "fill": _filled,
    "put": _put,
    "resize": _resized,
    "out": _out,
    "index": lambda x: x[torch.tensor([0, 1])],
    "unique": lambda x: torch.unique_consecutive(x % 5),
    "sort": lambda x: x.sort(descending=True).values + x.topk(4).values,
    "argmax": lambda x: x.argmax(1) + x.max(1).indices,
    "cat": lambda x: torch.cat([x, x.t().reshape(3, 4)]),
    "einsum": lambda x: torch.einsum("ij,kj->ik", x, x),
    "unfold": lambda x: x.unfold(0, 2, 1),
    "complex": lambda x: torch.view_as_real(torch.view_as_complex(x.view(3, 2, 2)) * 1j).conj(),
    "fft": lambda x: torch.fft.fft(x).abs(),
    "var": lambda x: torch.stack([x.std(), x.var(), x.norm(), x.median(), x.quantile(0.5), x.logsumexp(0).sum()]),
    "where": lambda x: torch.where(x > 3, x, 0.0).clamp_(0, 5).cumsum(0),
    "losses": lambda x: F.mse_loss(x, x + 1) + F.l1_loss(x, x * 2) + F.smooth_l1_loss(x, x * 2),
    "interpolate": lambda x: F.interpolate(x[None, None], scale_factor=2.0, mode="bilinear"),
    "make": lambda x: (
        torch.linspace(0, 1, 4, device=x.device) + torch.eye(4, device=x.device) + torch.arange(4.0, device=x.device)
    ),
    "types": lambda x: x.half().bfloat16().long().bool(),
    "inverse": lambda x: torch.linalg.inv(x[:, :3] + 10 * torch.eye(3, device=x.device)),
    "transpose": lambda x: F.conv_transpose2d(x[None, None], torch.ones(1, 2, 2, 2, device=x.device)),
    "group_norm": lambda x: F.group_norm(x[None].transpose(1, 2), 2),
    "one_hot": lambda x: F.one_hot(x.long().flatten() % 3),
    "bincount": lambda x: torch.bincount(x.long().flatten()),
    "devices": lambda x: x if x.device.type == "cpu" else x.to("emu:1").to("emu:0"),
}


def errors_of_kernels_come_later_and_stay() -> None:
    """An index that is out of range raises at the next wait, and from then on at every use of that device."""
    gate = Gate()
    x = torch.zeros(3, device="emu")
    y = torch.gather(x, 0, torch.tensor([7], device="emu:1").to("emu", non_blocking=True))
    z = y + 1  # raises nothing: the device has not come to it
    gate.open()
    for call in (torch.accelerator.synchronize, z.cpu, lambda: torch.ones(1, device="emu"), lambda: y + 1):
        with pytest.raises(torch.AcceleratorError, match="^emu error: device-side assert triggered"):
            call()
    assert torch.ones(1, device="emu:1").item() == 1


def a_fork_before_the_first_use_works_and_one_after_it_is_refused() -> None:
    """Importing torch, counting and naming devices leave a process that may fork; using one does not."""
    threads = threading.active_count(), len(os.listdir("/proc/self/task"))
    assert emu().device_count() == 2
    assert emu().get_device_properties(0).name
    assert not emu().is_initialized()
    assert not emu().has_context(0)
    assert (threading.active_count(), len(os.listdir("/proc/self/task"))) == threads
    assert _in_child(lambda: torch.ones(2, device="emu").sum().item()) == "2.0"
    torch.ones(2, device="emu").sum().item()
    assert emu().is_initialized()
    assert emu().has_context(0)
    assert not emu().has_context(1)
    assert "Cannot re-initialize emu in forked subprocess" in _in_child(lambda: torch.ones(2, device="emu"))


def _in_child(call: Callable[[], object]) -> str:
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            text = str(call())
        except RuntimeError as error:
            text = str(error)
        os.write(write, text.encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as answer:
        text = answer.read()
    os.waitpid(pid, 0)
    return text


def masked_devices_keep_their_identity() -> None:
    """EMU_VISIBLE_DEVICES hides devices, renumbers the others, and leaves their UUIDs."""
    both = [emu().get_device_properties(index).uuid for index in range(2)]
    os.environ["EMU_VISIBLE_DEVICES"] = "1"
    assert emu().device_count() == 1
    assert emu().get_device_properties(0).uuid == both[1]
    os.environ["EMU_VISIBLE_DEVICES"] = ""
    assert emu().device_count() == 0
    assert not torch.accelerator.is_available()


def a_process_ends_while_the_device_is_busy() -> None:
    """The end of a process does not wait for a device that is held, nor crash."""
    Gate()
    torch.ones(3, device="emu").add_(1)  # enqueued, never run


OWN_PROCESS = (
    errors_of_kernels_come_later_and_stay,
    a_fork_before_the_first_use_works_and_one_after_it_is_refused,
    masked_devices_keep_their_identity,
    a_process_ends_while_the_device_is_busy,
)
"""The claims after which a process is not good for others."""

HELPERS = (make_cnn, trained, same_numbers)


def emu() -> Any:
    """Return the module `torch.emu`, which no type checker knows."""
    return torch.get_device_module("emu")


CLAIMS = {
    name: function
    for name, function in list(globals().items())
    if inspect.isfunction(function)
    and function.__module__ == __name__
    and not name.startswith("_")
    and function not in (*HELPERS, emu)
}


def outcomes_of(*names: str) -> dict[str, str]:
    """Run the claims; what came of each."""
    outcomes = {}
    for name in names:
        try:
            CLAIMS[name]()
        except Exception:  # noqa: BLE001 # whatever it was, it is this claim's outcome
            outcomes[name] = traceback.format_exc()
        else:
            outcomes[name] = "holds"
    return outcomes
