"""Units of memory, in bytes."""

GB = 10**9  # what metrics and messages say
GIB = 2**30  # what SGLang reports, under the name GB
