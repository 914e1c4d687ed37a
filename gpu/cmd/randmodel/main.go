// Command randmodel writes a checkpoint with random weights: the shapes of real models, for measurements that need their
// size and not their answers. It owns the named shapes; package model writes.
package main

import (
	"flag"
	"fmt"
	"os"
	"slices"
	"strings"

	"meridian.internal/gpu/model"
)

// shapes are config.json files. The vocabulary is that of the tokenizer that the checkpoint gets.
var shapes = map[string]string{
	"llama-1b": `{"architectures": ["LlamaForCausalLM"], "vocab_size": 2048, "hidden_size": 2048, "intermediate_size": 8192,
		"num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "max_position_embeddings": 32768,
		"rms_norm_eps": 1e-5, "rope_theta": 500000, "tie_word_embeddings": true, "torch_dtype": "bfloat16"}`,
	"llama-8b": `{"architectures": ["LlamaForCausalLM"], "vocab_size": 2048, "hidden_size": 4096, "intermediate_size": 14336,
		"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 32768,
		"rms_norm_eps": 1e-5, "rope_theta": 500000, "tie_word_embeddings": false, "torch_dtype": "bfloat16"}`,
	"small": `{"architectures": ["LlamaForCausalLM"], "vocab_size": 2048, "hidden_size": 32, "intermediate_size": 64,
		"num_hidden_layers": 4, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 32768,
		"rms_norm_eps": 1e-5, "rope_theta": 500000, "tie_word_embeddings": true, "torch_dtype": "float32"}`,
}

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "randmodel:", err)
		os.Exit(1)
	}
}

func run(args []string) error {
	names := make([]string, 0, len(shapes))
	for name := range shapes {
		names = append(names, name)
	}
	slices.Sort(names)
	f := flag.NewFlagSet("randmodel", flag.ContinueOnError)
	shape := f.String("shape", "small", "one of "+strings.Join(names, ", ")+", or the path of a config.json")
	out := f.String("out", "", "folder to write; must be given")
	seed := f.Uint64("seed", 1, "of the weights")
	if err := f.Parse(args); err != nil {
		return err
	}
	if *out == "" || f.NArg() > 0 {
		return fmt.Errorf("want --out DIR and no argument, got %q", f.Args())
	}
	config := []byte(shapes[*shape])
	if len(config) == 0 {
		var err error
		if config, err = os.ReadFile(*shape); err != nil {
			return fmt.Errorf("--shape %s is none of %s, and no file: %w", *shape, strings.Join(names, ", "), err)
		}
	}
	return model.WriteRandom(*out, config, *seed)
}
