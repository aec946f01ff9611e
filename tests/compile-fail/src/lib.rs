//! What the programs in `tests/cases` are compiled with; nothing else, so that little has to be compiled for them.
