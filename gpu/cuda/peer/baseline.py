"""Times Hugging Face transformers on the shape of the benchmark, for its second column. Prints name and milliseconds."""
import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM, StaticCache

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=128256, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32,
    num_key_value_heads=8, head_dim=64, max_position_embeddings=40960, tie_word_embeddings=True, rope_theta=500000.0,
)
with torch.device("cuda"):
    torch.set_default_dtype(torch.bfloat16)
    model = LlamaForCausalLM(config).eval()


def median_ms(run, repeats):
    times = []
    for i in range(repeats + 3):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        end.synchronize()
        if i >= 3:
            times.append(start.elapsed_time(end))
    return sorted(times)[len(times) // 2]


@torch.inference_mode()
def prefill(n):
    ids = torch.randint(0, 128256, (1, n), device="cuda")
    return median_ms(lambda: model(ids, use_cache=True, logits_to_keep=1), 7)


@torch.inference_mode()
def decode(batch, context):
    """One step with a static cache, replayed as a CUDA graph."""
    cache = StaticCache(config=config, max_cache_len=context + 64)
    ids = torch.randint(0, 128256, (batch, context), device="cuda")
    for at in range(0, context, 256):
        end = min(at + 256, context)
        model(ids[:, at:end], past_key_values=cache, use_cache=True, logits_to_keep=1, cache_position=torch.arange(at, end, device="cuda"))
    token, position = ids[:, :1].contiguous(), torch.tensor([context], device="cuda")

    def step():
        return model(token, past_key_values=cache, use_cache=True, cache_position=position, position_ids=position.view(1, 1)).logits.argmax(-1)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return median_ms(graph.replay, 21)


for name, run in [(f"prefill {n}", lambda n=n: prefill(n)) for n in (2048, 8192)] + [
    (f"decode {b} {c}", lambda b=b, c=c: decode(b, c)) for b, c in ((1, 1024), (16, 1024), (64, 1024))
]:
    try:
        print(name, run(), flush=True)
    except Exception as e:  # one case that this version cannot do leaves the others
        print(f"{name}: {e}".replace("\n", " ")[:300], file=sys.stderr, flush=True)
    torch.cuda.empty_cache()
