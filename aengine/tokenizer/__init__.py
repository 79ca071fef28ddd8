"""Text to token ids and back, chats to prompts. Knows nothing of requests.

`Tokenizer` reads `tokenizer.json` with the tokenizers library. transformers is imported for chat templates and for models without that
file. A tokenizer with custom code renders chats without running that code. A directory without any file of a tokenizer is a model without
one: ids go in and come out.

A prompt is refused before it is tokenized if it has too many bytes: 64 of them, or as many as the longest token of the vocabulary has, make
at least one token. A text of more than 4 characters for each token that fits is first counted in pieces of 16,384 characters (10 ms each),
and refused as soon as the count cannot fit. A cut can add tokens, so a piece counts for as many tokens less as the longest token has bytes.
Then the text is encoded once, whole, in a worker without the GIL (0.7 s per million characters).

A token of a byte-level vocabulary brings the same bytes wherever it stands, so `ByteDetokenizer` keeps what each brings and holds back an
unfinished character. Any other sequence is decoded by `Detokenizer`, which returns text that no later token can change. It repeats none of
a decoder's rules: it decodes a short window of tokens with the full decoder and takes the difference. It holds back U+FFFD at the end (an
unfinished character) and a whole run of byte tokens (`<0xE4>`), because a bad last byte spoils the run. Tokens that decode to nothing never
enter the window: as its first token they would make a decoder strip a space. The tokenizers library's own stream decoder (0.23.3) fails
for a third of random sequences with byte fallback and is wrong for an eighth, so it is not used.
"""
