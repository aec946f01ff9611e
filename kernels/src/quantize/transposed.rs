//! Transposes codes with scales that serve both orientations. A tile of 128x128 codes passes
//! through shared memory, so that both operands are accessed in runs of 128 bytes. Its scale, or
//! tile of E8M0 bytes, moves to the mirrored position.

use cubecl::prelude::*;

use super::tile::{COL_WORDS, TILE_ROWS, Tile, UNIT_ROWS, UNITS_X, tile_cols};
use super::words;
use crate::element_type::ElementType;
use crate::granularity::{BLOCK, MX_BLOCK, TILE_WORDS};
use crate::grid::{UNITS, fold};
use crate::load::{Geometry, GeometryLaunch, all_loaded, load_pinned};
use crate::mx::tile_row_word;
use crate::operand::check_size;
use crate::ptx::cvt::Isa;
use crate::version::Version;
use crate::{Granularity, KernelError, Operand, row_words};

/// A unit holds 16 codes of a row, like the 16 elements per unit in a cast of 16-bit floats.
const LAYOUT: ElementType = ElementType::Bf16;

/// Words of a unit per row.
const CHUNK_WORDS: u32 = 4;

const _: () = assert!(tile_cols(LAYOUT, 1) == TILE_ROWS && TILE_ROWS == BLOCK as u32);

/// Operand `[k, rows]` with the same values as `operand`, transposed. Scales of blocks of 32 must
/// be equal in squares of 32 by 32, as [`ScaleMode::E8m0Square`](crate::ScaleMode::E8m0Square)
/// makes them. Only the scale of each square's first row is read.
///
/// Equals [`reference::transpose`](crate::reference::transpose) bit for bit. The host does not wait
/// for the device.
///
/// # Errors
/// [`KernelError::UnfitGranularity`] for per-row scales or 1×128 blocks. Otherwise as
/// [`scaled_gemm`](crate::scaled_gemm) for the operand.
pub fn transpose<R: Runtime>(client: &ComputeClient<R>, operand: &Operand) -> Result<Operand, KernelError> {
    operand.check()?;
    let &Operand { rows, k, granularity, .. } = operand;
    let scales = match granularity {
        Granularity::Tensor => None,
        Granularity::Block128x128 | Granularity::Block1x32 => Some(words(client, granularity.scale_words(k, rows))),
        Granularity::Row | Granularity::Block1x128 => {
            // The transpose would need other scales.
            let reason = "codes have other scales when transposed: only tensorwise, 128x128, and 1x32 in squares serve both ways";
            return Err(KernelError::UnfitGranularity { granularity, reason });
        }
    };
    check_size(k, row_words(rows), rows)?;
    let codes = words(client, k * row_words(rows));
    let [row_pitch, col_pitch] = [k, rows].map(|len| row_words(len) / CHUNK_WORDS as usize);
    let cubes = rows.div_ceil(BLOCK) * k.div_ceil(BLOCK);
    let isa = Isa::of(client);
    // SAFETY: the operand is checked, and the outputs have the sizes given here. Loads are of
    // existing rows and chunks. Stores of codes are guarded by the columns and by the pitch. Only
    // tile `(r, c)` writes the scales of tile `(c, r)`.
    unsafe {
        transpose_codes::launch_unchecked::<R>(
            client,
            fold(client, cubes as u32),
            CubeDim::new_1d(UNITS),
            operand.codes_array(CHUNK_WORDS as usize),
            scales.as_ref().map(|_| operand.scales_array()).into(),
            ArrayArg::from_raw_parts(codes.clone(), k * col_pitch),
            scales.as_ref().map(|to| ArrayArg::from_raw_parts(to.clone(), granularity.scale_words(k, rows))).into(),
            GeometryLaunch::new(rows as u32, k as u32, 0, 0, 0),
            row_pitch as u32,
            col_pitch as u32,
            granularity,
            isa,
            Version::of(client),
        );
    }
    let inv_scale = scales.unwrap_or_else(|| operand.inv_scale.clone());
    Ok(Operand { codes, inv_scale, rows: k, k: rows, ..operand.clone() })
}

#[cube(launch_unchecked)]
fn transpose_codes(
    codes: &Array<Vector<u32, Const<4>>>,
    inv_scales: &ComptimeOption<Array<u32>>,
    to_codes: &mut Array<Vector<u32, Const<4>>>,
    to_scales: &mut ComptimeOption<Array<u32>>,
    geometry: Geometry,
    row_pitch: u32,
    col_pitch: u32,
    #[comptime] granularity: Granularity,
    #[comptime] isa: Isa,
    #[comptime] _version: Version,
) {
    let tile = Tile::of_cube(geometry, LAYOUT, 1u32);
    if tile.row0 >= tile.geometry.rows {
        terminate!();
    }
    let chunk = min(tile.col0 / comptime!(4 * CHUNK_WORDS) + UNIT_POS % UNITS_X, row_pitch - 1);
    let row = tile.row0 + UNIT_POS / UNITS_X * UNIT_ROWS;
    let mut raw = Array::<u32>::new(comptime!((UNIT_ROWS * CHUNK_WORDS) as usize));
    #[unroll]
    for i in 0..UNIT_ROWS {
        // Rows past the end repeat the last one and are masked.
        let at = min(row + i, tile.geometry.rows - 1) * row_pitch + chunk;
        load_pinned(codes, at, &mut raw, comptime!(i * CHUNK_WORDS), isa);
    }
    all_loaded(isa);
    let mut stage = SharedMemory::<u32>::new_aligned(comptime!((TILE_ROWS * COL_WORDS) as usize), 16usize);
    #[unroll]
    for q in 0..CHUNK_WORDS {
        let mut along = Array::<u32>::new(comptime!(UNIT_ROWS as usize));
        #[unroll]
        for i in 0..UNIT_ROWS {
            along[i as usize] = raw[comptime!((i * CHUNK_WORDS + q) as usize)];
        }
        tile.stage_cols(&mut stage, &along, 0u32, q, isa);
    }
    #[comptime]
    if let ComptimeOption::Some(to) = to_scales {
        #[comptime]
        if let ComptimeOption::Some(from) = inv_scales {
            mirror_scales(from, to, &tile, granularity);
        }
    }
    sync_cube();
    tile.store_cols(&stage, to_codes, col_pitch);
}

/// Writes the transposed scales of the tile.
#[cube]
fn mirror_scales(from: &Array<u32>, to: &mut Array<u32>, tile: &Tile, #[comptime] granularity: Granularity) {
    let block = comptime!(BLOCK as u32);
    let (down, across) = (tile.geometry.rows.div_ceil(block), tile.geometry.cols.div_ceil(block));
    let (row, col) = (tile.row0 / block, tile.col0 / block);
    let (first, mirrored) = (row * across + col, col * down + row);
    if comptime!(granularity.is_mx()) {
        if UNIT_POS < comptime!(TILE_WORDS as u32) {
            let line = UNIT_POS;
            let shift = line / comptime!(MX_BLOCK as u32) * 8;
            let mut word = 0u32.runtime();
            #[unroll]
            for band in 0..4u32 {
                // Word of the band's first row.
                let of_band = from[(first * comptime!(TILE_WORDS as u32) + band) as usize];
                word |= ((of_band >> shift) & 0xffu32) << comptime!(8 * band);
            }
            let exists = tile.col0 + line < tile.geometry.cols;
            to[(mirrored * comptime!(TILE_WORDS as u32) + tile_row_word(line)) as usize] =
                select(exists, word, 0u32.runtime());
        }
    } else if UNIT_POS == 0 {
        to[mirrored as usize] = from[first as usize];
    }
}
