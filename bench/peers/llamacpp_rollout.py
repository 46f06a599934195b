"""llama.cpp through llama-cpp-python's API: continuous batching over parallel sequences.

1. A prompt is computed once, in a sequence of its own, and its cells are shared with its samples.
2. Every decode carries one token of each live sample; a sample that has ended leaves at once, and
   a waiting one takes its slot.
3. Tokens are drawn here, from all rows' logits at once, with their log-probabilities.

Weights and KV cache are float32, as ours are. `flash_attention` is -1 for llama.cpp's own choice,
which here means on, and 0 for off.
"""

import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import gguf
import llama_cpp
import numpy as np
from serving import Repeat, serve
from workload import SHAPES, Requests, Shape, make_requests

BATCH = 2048
NUM_BLOCKS = 32  # of the two-level search in a row's weights


def prepare(job: dict) -> tuple[str, Repeat]:
    shape = SHAPES[job["shape"]]
    requests = make_requests(shape, **job["requests"])
    engine = Engine(shape, requests, job)

    def repeat() -> dict:
        num_tokens = engine.run()
        assert num_tokens == requests.num_new_tokens, (num_tokens, requests.num_new_tokens)
        return {"tokens": num_tokens}

    return f"llama-cpp-python {llama_cpp.__version__}", repeat


@dataclass
class Live:
    """A sample that is being decoded, in sequence `slot`: its last token and what comes after."""

    prompt: int
    slot: int
    position: int
    num_left: int
    token: int


class Engine:
    def __init__(self, shape: Shape, requests: Requests, job: dict):
        self.requests, self.shape = requests, shape
        self.slots = slots = job["slots"]
        self.generator = np.random.default_rng(0)
        llama_cpp.llama_backend_init()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.gguf"
            write_model(path, shape)
            parameters = llama_cpp.llama_model_default_params()
            parameters.use_mmap = False
            self.model = llama_cpp.llama_model_load_from_file(str(path).encode(), parameters)
        options = llama_cpp.llama_context_default_params()
        longest = max(map(len, requests.prompts)) + max(map(max, requests.limits_PG))
        options.n_ctx = -(-(slots + len(requests.prompts)) * longest // 256) * 256
        options.n_batch, options.n_ubatch = BATCH, 512
        options.n_seq_max = slots + len(requests.prompts)
        options.n_threads = options.n_threads_batch = job["cores"]
        options.kv_unified = True
        options.flash_attn_type = job["flash_attention"]
        options.type_k = options.type_v = 0  # float32
        self.context = llama_cpp.llama_init_from_model(self.model, options)
        self.memory = llama_cpp.llama_get_memory(self.context)
        self.batch = llama_cpp.llama_batch_init(BATCH, 0, 1)

    def run(self) -> int:
        """How many tokens were drawn."""
        llama_cpp.llama_memory_clear(self.memory, True)
        self.logits_of_prompt: dict[int, np.ndarray] = {}
        self.waiting = list(reversed(self.requests.samples))
        self.num_open = Counter(prompt for prompt, _ in self.waiting)
        self.free = list(range(self.slots))
        live: list[Live] = []
        num_tokens = 0
        while self.waiting or live:
            num_before = len(live)
            live += self.admitted()
            num_tokens += len(live) - num_before
            live = self.those_left(live)
            if live:
                logits_BV = self.decode([(x.token, x.position, x.slot, True) for x in live])
                for row, token in zip(live, self.draw(logits_BV), strict=True):
                    row.token, row.position, row.num_left = (
                        token,
                        row.position + 1,
                        row.num_left - 1,
                    )
                num_tokens += len(live)
                live = self.those_left(live)
        return num_tokens

    def admitted(self) -> list[Live]:
        """Waiting samples in free slots, each with its first token."""
        chosen = [self.waiting.pop() for _ in range(min(len(self.free), len(self.waiting)))]
        if not chosen:
            return []
        self.prefill([p for p in dict.fromkeys(p for p, _ in chosen)])
        logits_BV = np.stack([self.logits_of_prompt[prompt] for prompt, _ in chosen])
        rows = []
        for (prompt, limit), token in zip(chosen, self.draw(logits_BV), strict=True):
            slot = self.free.pop()
            llama_cpp.llama_memory_seq_cp(self.memory, self.slots + prompt, slot, -1, -1)
            rows.append(Live(prompt, slot, len(self.requests.prompts[prompt]), limit - 1, token))
        return rows

    def prefill(self, prompts: list[int]) -> None:
        """Compute the prompts that are not yet, as many at once as a batch holds."""
        items, ends = [], []
        for prompt in [p for p in prompts if p not in self.logits_of_prompt]:
            tokens = self.requests.prompts[prompt]
            if len(items) + len(tokens) > BATCH:
                self.take(items, ends)
                items, ends = [], []
            last = len(tokens) - 1
            items += [(t, i, self.slots + prompt, i == last) for i, t in enumerate(tokens)]
            ends.append(prompt)
        if items:
            self.take(items, ends)

    def take(self, items: list[tuple], ends: list[int]) -> None:
        self.logits_of_prompt |= zip(ends, self.decode(items).copy(), strict=True)

    def those_left(self, live: list[Live]) -> list[Live]:
        """The samples that go on; the others' slots are free, and prompts that none needs gone."""
        for row in live:
            if row.num_left == 0:
                llama_cpp.llama_memory_seq_rm(self.memory, row.slot, -1, -1)
                self.free.append(row.slot)
                self.num_open[row.prompt] -= 1
                if not self.num_open[row.prompt]:
                    own = self.slots + row.prompt
                    llama_cpp.llama_memory_seq_rm(self.memory, own, -1, -1)
        return [row for row in live if row.num_left]

    def decode(self, items: list[tuple[int, int, int, bool]]) -> np.ndarray:
        """logits_BV of the items (token, position, sequence, whether its logits are wanted)."""
        self.batch.n_tokens = len(items)
        for i, (token, position, sequence, is_wanted) in enumerate(items):
            self.batch.token[i], self.batch.pos[i] = token, position
            self.batch.n_seq_id[i], self.batch.seq_id[i][0] = 1, sequence
            self.batch.logits[i] = is_wanted
        code = llama_cpp.llama_decode(self.context, self.batch)
        assert code == 0, code
        num_wanted = sum(item[3] for item in items)
        logits = llama_cpp.llama_get_logits(self.context)
        return np.ctypeslib.as_array(logits, shape=(num_wanted, self.shape.vocabulary))

    def draw(self, logits_BV: np.ndarray) -> list[int]:
        """A token of each row by inverse CDF, first among blocks, then in one; and how likely."""
        B, V = logits_BV.shape
        rows = np.arange(B)
        weights = np.exp(logits_BV - logits_BV.max(axis=1, keepdims=True))
        weights = weights.reshape(B, NUM_BLOCKS, V // NUM_BLOCKS)
        sums = weights.sum(axis=2).cumsum(axis=1)
        target = self.generator.random(B, np.float32) * sums[:, -1]
        block = np.minimum((sums <= target[:, None]).sum(axis=1), NUM_BLOCKS - 1)
        below = np.where(block > 0, sums[rows, block - 1], 0)
        inside = weights[rows, block].cumsum(axis=1) <= (target - below)[:, None]
        offset = np.minimum(inside.sum(axis=1), V // NUM_BLOCKS - 1)
        self.logprobs = np.log(weights[rows, block, offset] / sums[:, -1])
        return (block * (V // NUM_BLOCKS) + offset).tolist()


def write_model(path: Path, shape: Shape) -> None:
    """A GGUF of the shape with random weights and no vocabulary."""
    generator = np.random.default_rng(0)
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(2048)
    writer.add_embedding_length(shape.width)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.ffn)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_size)
    writer.add_value_length(shape.head_size)
    writer.add_rope_dimension_count(shape.head_size)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(shape.vocabulary)
    writer.add_tokenizer_model("no_vocab")
    writer.add_file_type(0)
    for name, size in tensors(shape).items():
        values = np.ones(size, np.float32)
        if len(size) == 2:
            values = 0.02 * generator.standard_normal(size, np.float32)
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def tensors(shape: Shape) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor by its GGUF name, kernels as [out, in]."""
    D, F, C = shape.width, shape.ffn, shape.head_size
    sizes = {"token_embd": (shape.vocabulary, D), "output_norm": (D,)}
    for layer in range(shape.layers):
        sizes |= {
            f"blk.{layer}.{name}": size
            for name, size in {
                "attn_norm": (D,),
                "ffn_norm": (D,),
                "attn_q": (shape.heads * C, D),
                "attn_k": (shape.kv_heads * C, D),
                "attn_v": (shape.kv_heads * C, D),
                "attn_output": (D, shape.heads * C),
                "ffn_gate": (F, D),
                "ffn_up": (F, D),
                "ffn_down": (D, F),
            }.items()
        }
    return {f"{name}.weight": size for name, size in sizes.items()}


if __name__ == "__main__":
    serve(prepare)
