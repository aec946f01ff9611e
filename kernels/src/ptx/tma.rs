//! Copies between device memory and shared memory (TMA): boxes of tensors, and bytes.

use cubecl::ir::Variable;
use cubecl::prelude::*;

use super::{Operand, asm, element_address, input, name};

fn address(map: &Variable) -> Operand {
    ("l", format!("&{}", name(map)))
}

/// Destination of a box.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Reach {
    /// This block.
    Block,
    /// This block. Its bytes count at an mbarrier of either block of the pair, a cluster address.
    Pair,
    /// Every block of the cluster whose bit is set, at the same addresses in each.
    Cluster(u32),
}

/// Starts to load the map's box at column `x`, row `y` to `shared`. Its bytes count at `barrier`.
/// Elements outside the tensor are zero.
#[cube]
pub(crate) fn tma_load<T: CubePrimitive>(
    map: &TensorMap<T, Tiled>,
    shared: u32,
    barrier: u32,
    x: u32,
    y: u32,
    #[comptime] to: Reach,
) {
    intrinsic!(|scope| {
        let mut inputs = vec![input(scope, *shared.expand), address(&map.expand)];
        inputs.extend([*x.expand, *y.expand, *barrier.expand].map(|value| input(scope, value)));
        let (qualifier, mask) = match to {
            Reach::Block => ("", None),
            Reach::Pair => (".cta_group::2", None),
            Reach::Cluster(mask) => (".multicast::cluster", Some(("h", format!("static_cast<uint16>({mask})")))),
        };
        let place = if mask.is_some() { ", %5" } else { "" };
        inputs.extend(mask);
        let template = format!(
            "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes{qualifier} \
             [%0], [%1, {{%2, %3}}], [%4]{place};\n"
        );
        asm(scope, &template, &[], &inputs);
    })
}

/// Starts to load the map's box at column `x`, row `y`, head `z` and batch `w` to `shared`, as
/// [`tma_load`].
#[cube]
pub(crate) fn tma_load_head<T: CubePrimitive>(
    map: &TensorMap<T, Tiled>,
    shared: u32,
    barrier: u32,
    x: u32,
    y: u32,
    z: u32,
    w: u32,
) {
    intrinsic!(|scope| {
        let mut inputs = vec![input(scope, *shared.expand), address(&map.expand)];
        inputs.extend([x, y, z, w, barrier].map(|value| input(scope, *value.expand)));
        let template = "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes \
                        [%0], [%1, {%2, %3, %4, %5}], [%6];\n";
        asm(scope, template, &[], &inputs);
    })
}

/// Starts to load `bytes` from element `index` of `from` to `shared`, all multiples of 16 bytes. They
/// count at `barrier`.
#[cube]
pub(crate) fn bulk_load<T: CubePrimitive>(
    from: &Array<T>,
    index: u32,
    shared: u32,
    barrier: u32,
    #[comptime] bytes: u32,
) {
    intrinsic!(|scope| {
        let from = element_address(scope, &from.expand, *index.expand);
        let inputs = [input(scope, *shared.expand), from, input(scope, *barrier.expand)];
        let template =
            format!("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], {bytes}, [%2];\n");
        asm(scope, &template, &[], &inputs);
    })
}

/// Starts to write the map's box at column `x`, row `y` of matrix `z` from `shared`, and commits a
/// group of stores. Elements outside the matrix are not written.
#[cube]
pub(crate) fn tma_store<T: CubePrimitive>(map: &TensorMap<T, Tiled>, shared: u32, x: u32, y: u32, z: u32) {
    intrinsic!(|scope| {
        let mut inputs = vec![address(&map.expand)];
        inputs.extend([*x.expand, *y.expand, *z.expand, *shared.expand].map(|value| input(scope, value)));
        let template = "cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [%0, {%1, %2, %3}], [%4];\n\
                        cp.async.bulk.commit_group;\n";
        asm(scope, template, &[], &inputs);
    })
}

ptx! {
    /// Commits an empty group of stores, so that [`tma_store_wait_read`] counts it.
    pub(crate) fn tma_store_none() { "cp.async.bulk.commit_group;\n" }

    /// Waits until all but the last `pending` groups of stores of this thread have read their
    /// shared memory.
    pub(crate) fn tma_store_wait_read(#[comptime] pending: u32) { "cp.async.bulk.wait_group.read {pending};\n" }
}

/// Prefetches the map before its first use.
#[cube]
pub(crate) fn tma_prefetch_map<T: CubePrimitive>(map: &TensorMap<T, Tiled>) {
    intrinsic!(|scope| { asm(scope, "prefetch.tensormap [%0];\n", &[], &[address(&map.expand)]) })
}
