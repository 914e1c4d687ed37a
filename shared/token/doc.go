// Package token turns text into token ids and back, the way a checkpoint's own files say: the tokenizer of
// tokenizer.json (byte-level BPE, and SentencePiece-style BPE with byte fallback), an incremental decoder that never
// emits half a character, an incremental matcher of stop strings, and the chat template of tokenizer_config.json.
//
// It is pure: bytes in, values out. It opens no file, starts no service and knows nothing of models, requests or HTTP.
// A file that asks for something this package does not implement is refused with the field and the value named, because
// a tokenizer that is almost right gives plausible text from the wrong ids.
//
// A *Tokenizer and a *Template may be shared by any number of goroutines; a *Stream and a *Stopper belong to one.
package token
