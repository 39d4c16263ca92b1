#!/usr/bin/env python3
"""StreamLLM+ (KVpop, table 1): the model's weights learn to do with sinks and a window, from its dense self.

    streaming_llm.py --text build/corpus/corpus.tar.xz --tokens 4096 --out build/streaming-llm

It is KVpop's baseline: same teacher, same loss over the teacher's largest logits, same budgets, without
scorers."""

import kvpolicy as kvp
from distilled import Distilled
from loop import train


class StreamingLLM(Distilled):
    name = "streaming_llm"

    @classmethod
    def trains(cls, options):
        return True

    def policy(self, layer):
        return kvp.StreamingLLM(self.options.sinks, self.entries - self.options.sinks)

    def attend(self, inputs):
        return self.attend_hard(inputs)

    def graph_key(self):
        return self.entries

    def loss(self, ids, weights):
        teacher = self.largest(self.dense_logits(ids))
        return {"loss": self.divergence(teacher, self.logits(ids, self.attend))}

    def save(self, path, notes):
        """A file without scorers, which names the policy; the weights are in the folder model."""
        sinks = self.options.sinks
        policy = kvp.Scorers([], window=self.options.budgets[0] - sinks, sinks=sinks, system="streaming")
        policy.training_notes = notes
        policy.save(path)


if __name__ == "__main__":
    train(StreamingLLM)
