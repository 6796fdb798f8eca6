"""module.py PROGRAM: holds the Python module to what the installed program prints."""

import json
import subprocess
import sys
import threading

import shardlab


def printed(*words):
    done = subprocess.run([sys.argv[1], *words, "--format", "json"], capture_output=True, check=False)
    return json.loads(done.stdout)


def refused(ask, *said, **question):
    try:
        ask(**question)
    except shardlab.Refused as error:
        assert error.status == 2, error.status
        for text in said:
            assert text in error.message + error.hint, (text, error.message, error.hint)
    else:
        raise AssertionError(f"{question} was answered")


assert subprocess.run([sys.argv[1], "--version"], capture_output=True, text=True).stdout.split()[1].startswith(shardlab.version())
names = shardlab.names()
assert "gpt2" in names["models"] and "hgx-h100-ndr" in names["machines"] and "megatron" in names["profiles"], names

told = shardlab.memory(model="llama-3.1-8b", machine="h100", devices=8, zero=3, micro_batch=1, seq_len="4Ki", precision="bf16", tokens="1T")
assert told == printed("memory", "--model", "llama-3.1-8b", "--machine", "h100", "--devices", "8", "--zero", "3", "--micro-batch", "1", "--seq-len",
                       "4Ki", "--precision", "bf16", "--tokens", "1T")
offloaded = shardlab.memory(model="gpt2", machine="h100", devices=2, offload={"optimizer": "cpu"}, profile="shardlab", **{"model.layers": 4})
assert offloaded == printed("memory", "--model", "gpt2", "--machine", "h100", "--devices", "2", "--offload", "optimizer=cpu", "--profile", "shardlab",
                            "--set", "model.layers=4")

question = dict(model="llama-3.1-8b", machine="h100", devices=[8, 16], global_batch_tokens="1Mi", tp=[1, 2, 4], top=3, sequence_parallel=True)
answers = []
threads = [threading.Thread(target=lambda: answers.append(shardlab.search(**question))) for _ in range(2)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
expected = printed("search", "--model", "llama-3.1-8b", "--machine", "h100", "--devices", "8,16", "--global-batch-tokens", "1Mi", "--tp", "1,2,4", "--top",
                   "3", "--sequence-parallel", "true")
assert len(answers) == 2
for answer in answers:
    answer.pop("seconds")
expected.pop("seconds")
assert answers[0] == answers[1] == expected and len(expected["layouts"]) == 3

none = shardlab.search(model="llama-3.1-405b", machine="h100", devices=1, global_batch_tokens="64Ki")
assert none["layouts"] == []

refused(shardlab.memory, "model is missing", machine="h100")
refused(shardlab.memory, "no-such", model="no-such", machine="h100")
refused(shardlab.memory, "machine_file", model="gpt2", machine="local")
refused(shardlab.memory, "devices", model="gpt2", machine="h100", devices=1.5)
refused(shardlab.memory, "nested too deep", model="gpt2", machine="h100", tp=[[1]])
refused(shardlab.search, "no key `schedul`", model="gpt2", machine="h100", devices=2, global_batch_tokens="8Ki", schedul="1f1b")
refused(shardlab.search, "top", model="gpt2", machine="h100", devices=2, global_batch_tokens="8Ki", top=0)
print("every answer is the program's")
