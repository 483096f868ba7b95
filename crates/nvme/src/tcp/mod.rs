//! The NVMe/TCP transport: PDUs as types and a header-level decoder (being written).
