//! Allocates memory for scales, amaxes and codes.
//!
//! CubeCL's pool visits every live allocation of a page for each new one. With thousands of live
//! scales, allocating costs the host more than launching. So small arrays are parts of a larger
//! allocation, which is freed with the last of its parts.

use std::cell::RefCell;

use cubecl::prelude::*;
use cubecl::server::Handle;
use cubecl::stream_id::StreamId;

use crate::denylist::device_key;

/// Bytes of the largest array that shares an allocation: one f32 for each of 8,192 rows.
const SMALL: usize = 32 << 10;

/// Bytes of a shared allocation.
const WHOLE: usize = 256 << 10;

/// Unused rest of an allocation, for one device and stream.
struct Rest {
    of: (usize, StreamId),
    whole: Handle,
    start: usize,
}

thread_local! {
    static REST: RefCell<Option<Rest>> = const { RefCell::new(None) };
}

/// Allocates `len` words.
pub(crate) fn words<R: Runtime>(client: &ComputeClient<R>, len: usize) -> Handle {
    let bytes = 4 * len;
    if bytes > SMALL {
        return client.empty(bytes);
    }
    let of = (device_key(client), StreamId::current());
    REST.with_borrow_mut(|rest| {
        let known = rest.take().filter(|rest| rest.of == of && rest.start + bytes <= WHOLE);
        let Rest { whole, start, .. } = known.unwrap_or_else(|| Rest { of, whole: client.empty(WHOLE), start: 0 });
        let part = whole.clone().offset_start(start as u64).offset_end((WHOLE - start - bytes) as u64);
        let start = start + bytes.next_multiple_of(client.properties().memory.alignment as usize);
        *rest = Some(Rest { of, whole, start });
        part
    })
}
