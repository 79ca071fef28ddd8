"""Grammars that outputs must follow: JSON Schema, GBNF and regular expressions, compiled for the sampler.

`structured/grammars.py` compiles grammars in threads while the request waits outside the scheduler. Matchers live per row in
`sampling/grammar.py`. Both use llguidance: a parser with a lexer of lazily built states, which counts its work and stops at a limit. A
request has its grammar compiled for itself, because its states grow with use.

`grammars.py` writes the grammar, with `regex_dialect.py` for expressions, `gbnf.py` for EBNF, `json_schema.py` for schemas. What the
compiler would accept too much of, or take too long for, is rewritten or refused. 32 random tokens are tried before a grammar is accepted.

A schema goes through these files. `json_documents.py` parses it and finds what references refer to. `json_terms.py` works out each keyword,
satisfied or not, into alternatives for each type of value: `not` becomes the opposite of each keyword, `if` the two cases, `oneOf` each
schema without the others; `json_types.py` has the keywords of one type. An alternative is one of the constraints of `json_constraints.py`,
which can be combined with another one; what it asks of properties and items stays a set of schemas, so recursion ends. `json_schema.py`
writes the alternatives as a plain schema for the compiler, every array and object once, as a definition, with `json_numbers.py` for
numbers. What the compiler would not keep exact is left as marks: integers that are not floats as regular expressions, and properties by the
patterns of their names. Where there are any, `json_lark.py` writes the arrays and objects around them as rules. `tools/json_schemas.py`
counts what is enforced of a folder of schemas.

A grammar has no memory, so `uniqueItems` is not in it. `json_lark.py` notes where in a schema such arrays are, and
`sampling/unique_items.py` follows the output through these places and narrows the masks. A token that ends an item ends nothing else, so at
each item there is one moment at which it may be a repetition; a token with which an item begins like an earlier one is left only if the
grammar lets it become another one.
"""
