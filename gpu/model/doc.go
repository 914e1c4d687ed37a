// Package model owns checkpoints: it reads a Hugging Face folder (config.json, safetensors, generation_config.json,
// tokenizer files), checks that the whole of it is something that the back ends can run, and gives access to its tensors
// where they lie in the file. It runs no arithmetic on them, and it does not read the tokenizer: it only hands its bytes on.
//
// Weights stay in their own type (bf16, f16, f32) in memory that is mapped from the file, so a checkpoint costs no heap
// and two processes on one machine share it. A model that is being served must not be truncated in place.
package model
