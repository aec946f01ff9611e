//! Epilogue of a warpgroup's sums: scales, bias, one rounding, and the store. Chunks of 64 rows by
//! 128 bytes go through shared memory ([`tma::store`](crate::gemm::tma::store)).

use cubecl::prelude::*;

use super::plan::{MMA_ROWS, group_cols};
use super::rank::{consumer, group_origin};
use super::{CHUNK, GROUP, HopperConfig};
use crate::element_type::ElementType;
use crate::gemm::problem::Problem;
use crate::gemm::tma::item::Item;
use crate::gemm::tma::store::{Own, has_rows, leads, store_chunk, swizzled};
use crate::ptx::barrier::{fence_proxy_async, named_barrier};
use crate::ptx::shared::{stmatrix_x4, store_shared_pair};
use crate::ptx::tma::tma_store_wait_read;
use crate::ptx::wgmma::pack_half;

/// Scales a warpgroup's sums in place, adds the bias, and stores them.
#[cube]
pub(super) fn store_tile<O: Float>(
    sums: &mut Array<f32>,
    base: u32,
    out_map: &mut ComptimeOption<TensorMap<O, Tiled>>,
    out: &mut Array<O>,
    problem: &Problem,
    item: &Item,
    #[comptime] config: HopperConfig,
) {
    let (group_row, group_col) = group_origin(config);
    let thread = UNIT_POS % GROUP;
    let own = Own {
        row: item.work.row0 + group_row + thread / 32 * 16 + thread % 32 / 4,
        col: item.work.col0 + group_col + thread % 4 * 2,
    };
    let first = Own { row: item.work.row0 + group_row, col: item.work.col0 + group_col };
    #[comptime]
    match out_map {
        ComptimeOption::Some(map) => {
            if has_rows(first.row, &item.work, problem, MMA_ROWS as u32) {
                let cols = comptime!(config.store.chunk_cols() as u32);
                #[unroll]
                for chunk in 0..comptime!(group_cols(config.tile) as u32 / cols) {
                    let at = free_chunk(base, chunk, config);
                    finish(sums, comptime!([chunk * cols, cols]), problem, &own, item, config);
                    stage(sums, at, comptime!(chunk * cols / 2), config);
                    let to = Own { row: first.row, col: first.col + comptime!(chunk * cols) };
                    let by = comptime!([MMA_ROWS as u32, GROUP]);
                    store_chunk(map, out, at, &to, item, problem, config.store, by);
                }
            }
        }
        ComptimeOption::None => {
            #[unroll]
            for j in 0..comptime!(group_cols(config.tile) as u32 / 8) {
                let first = comptime!(8 * j);
                finish(sums, comptime!([first, 8u32]), problem, &own, item, config);
                let col = own.col + comptime!(8 * j);
                #[unroll]
                for i in 0..4u32 {
                    let (row, col) = (own.row + comptime!(8 * (i / 2)), col + comptime!(i % 2));
                    // TMA cannot write outputs whose row stride is not a multiple of 16 bytes.
                    problem.put::<O>(out, sums[comptime!((4 * j + i) as usize)], row, col, &item.work);
                }
            }
        }
    }
}

/// `sum · (inv_scale_a · inv_scale_b) + bias` for `columns`, given as the first and the count. Partial
/// sums stay unchanged.
#[cube]
fn finish(
    sums: &mut Array<f32>,
    #[comptime] columns: [u32; 2],
    problem: &Problem,
    own: &Own,
    item: &Item,
    #[comptime] config: HopperConfig,
) {
    let [first, count] = comptime!(columns);
    let (work, block) = (&item.work, 0u32.runtime());
    let any = item.step_begin < item.step_end;
    let mut scales_a = Array::<f32>::new(2usize);
    #[unroll]
    for i in 0..comptime!(if config.store.partial { 0u32 } else { 2 }) {
        scales_a[i as usize] = problem.line_factor(own.row + comptime!(8 * i), work, block, 0usize);
    }
    #[unroll]
    for j in 0..comptime!(if config.store.partial { 0 } else { count / 8 }) {
        #[unroll]
        for c in 0..2u32 {
            let col = own.col + comptime!(first + 8 * j + c);
            let shift = problem.bias.at(min(col, problem.n - 1));
            let scale_b = problem.line_factor(col, work, block, 1usize);
            #[unroll]
            for i in 0..2u32 {
                let place = comptime!((first / 2 + 4 * j + 2 * i + c) as usize);
                sums[place] = problem.finish(sums[place], scales_a[i as usize] * scale_b, shift, any);
            }
        }
    }
}

/// Address of a free chunk of this warpgroup. The last store from it has finished reading.
#[cube]
fn free_chunk(base: u32, #[comptime] chunk: u32, #[comptime] config: HopperConfig) -> u32 {
    if leads(GROUP) {
        tma_store_wait_read(comptime!(config.chunks as u32 - 1));
    }
    named_barrier(1 + consumer(), GROUP);
    let slot = consumer() * comptime!(config.chunks as u32) + comptime!(chunk % config.chunks as u32);
    base + comptime!(config.layout().chunks_at() as u32) + slot * comptime!(CHUNK as u32)
}

/// Writes a chunk of sums, from `first` on, to shared memory at `at`. It is then visible to TMA and
/// all threads of the warpgroup.
#[cube]
fn stage(sums: &Array<f32>, at: u32, #[comptime] first: u32, #[comptime] config: HopperConfig) {
    if comptime!(config.store.dtype == ElementType::F32) {
        stage_f32(sums, at, first);
    } else {
        stage_half(sums, at, first, comptime!(config.store.dtype == ElementType::Bf16));
    }
    fence_proxy_async();
    named_barrier(1 + consumer(), GROUP);
}

/// Writes 32 columns of f32, starting at sum `first`.
#[cube]
fn stage_f32(sums: &Array<f32>, at: u32, #[comptime] first: u32) {
    let thread = UNIT_POS % GROUP;
    let lane = thread % 32;
    #[unroll]
    for i in 0..2u32 {
        let row = thread / 32 * 16 + lane / 4 + comptime!(8 * i);
        #[unroll]
        for j in 0..4u32 {
            let place = comptime!((first + 4 * j + 2 * i) as usize);
            let address = swizzled(at, row, comptime!(2 * j) + lane % 4 / 2) + 8 * (lane % 2);
            store_shared_pair(address, sums[place], sums[place + 1]);
        }
    }
}

/// Writes 64 columns of f16 or bf16, starting at sum `first`.
#[cube]
fn stage_half(sums: &Array<f32>, at: u32, #[comptime] first: u32, #[comptime] bf16: bool) {
    let thread = UNIT_POS % GROUP;
    let lane = thread % 32;
    // Matrices: 16 bytes of the upper eight rows, of the lower eight, then both for the next 16
    // bytes.
    let row = thread / 32 * 16 + lane % 16;
    #[unroll]
    for j in 0..4u32 {
        let place = comptime!((first + 8 * j) as usize);
        let mut words = Array::<u32>::new(4usize);
        #[unroll]
        for i in 0..4usize {
            words[i] = pack_half(sums[comptime!(place + 2 * i)], sums[comptime!(place + 2 * i + 1)], bf16);
        }
        stmatrix_x4(swizzled(at, row, comptime!(2 * j) + lane / 16), &words);
    }
}
