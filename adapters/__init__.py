"""The adapters that come with interop, one file or folder each, written on `interop.contract` alone. They import no framework."""
