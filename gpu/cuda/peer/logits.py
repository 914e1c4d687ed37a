"""Second oracle for models: log probabilities by PyTorch and Hugging Face transformers, in float32 on the card.

Each line of the input is {"dir": checkpoint, "tokens": [...]}; each line of the output is, for every position, the 20 most likely
tokens behind it as [token, log probability] pairs, most likely first.
"""
import json
import sys

import torch
from transformers import AutoModelForCausalLM

torch.backends.cuda.matmul.allow_tf32 = False

for line in sys.stdin:
    job = json.loads(line)
    model = AutoModelForCausalLM.from_pretrained(job["dir"], dtype=torch.float32, attn_implementation="eager").eval().to("cuda")
    with torch.inference_mode():
        logits = model(torch.tensor([job["tokens"]], device="cuda")).logits[0].float()
    top = torch.log_softmax(logits, dim=-1).topk(20)
    json.dump([list(zip(t, p)) for t, p in zip(top.indices.tolist(), top.values.tolist())], sys.stdout)
    print(flush=True)
