//! `code = cast_rne(clamp(f32(x) · scale, ±FMAX))` for a whole matrix, in either or both orientations, one pass over `x`
//! after the one that finds its amax.
//!
//! A cube takes a tile of 64x64. Each of its 16x16 units casts 4x4 elements: four words along the rows, written at once,
//! and by exchanging the bytes four words along the columns, which pass through shared memory so that both copies are
//! written in runs of 64 bytes.

use cubecl::prelude::*;
use cubecl::server::Handle;

use crate::amax::{Scaling, scaling};
use crate::format::encode_scaled;
use crate::grid::{UNITS, fold, tile_origin};
use crate::view::{Checked, Geometry, MAX_INDEX, Source, load_quad, widen};
use crate::{Cast, Format, KernelError, MatrixView, Operand, Orientation, Quantized, row_words};

/// Rows and columns of a cube's tile.
const TILE: u32 = 64;

/// Words of one row of a tile.
const TILE_WORDS: u32 = TILE / 4;

/// Pitch of the staged transpose: one word more than a row, so that neighbouring columns start in different banks.
const STAGE_PITCH: u32 = TILE_WORDS + 1;

/// Casts `x [R, C]` to FP8 with one scale from its own amax, and writes the copies that `orientation` names.
///
/// `x` is any strided view of f32, f16 or bf16. Scale and codes equal [`reference::quantize`](crate::reference::quantize)
/// to the bit; see there for how NaN, infinities and zeros are treated. Nothing waits for the device.
///
/// # Errors
/// [`KernelError::EmptyMatrix`], [`UnsupportedDtype`](KernelError::UnsupportedDtype),
/// [`OutOfBounds`](KernelError::OutOfBounds), [`Misaligned`](KernelError::Misaligned),
/// [`TooLarge`](KernelError::TooLarge).
pub fn quantize<R: Runtime>(
    client: &ComputeClient<R>,
    x: &MatrixView,
    cast: Cast,
    orientation: Orientation,
) -> Result<Quantized, KernelError> {
    let x = check(client, x, orientation)?;
    let Scaling { amax, scale, inv_scale } = scaling(client, &x, cast);
    let (rows, cols) = cast_copies(client, &x, &scale, &inv_scale, cast, orientation);
    Ok(Quantized { rows, cols, amax, scale })
}

/// Casts `x [R, C]` to FP8 with a scale that is on the device already, f32 `[1]`, whatever the amax of `x`: what exceeds
/// the format saturates.
///
/// Returns the copies by rows and by columns that `orientation` names; both carry `inv_scale`. The result is that of
/// [`reference::cast`](crate::reference::cast) to the bit for every positive `scale` up to that of amax 1e-12, and all
/// codes are NaN if the scale is. `cast.scale_mode` is not looked at.
///
/// # Errors
/// As [`quantize`]; [`KernelError::OutOfBounds`] also for a scale of less than 4 bytes.
pub fn quantize_with_scale<R: Runtime>(
    client: &ComputeClient<R>,
    x: &MatrixView,
    scale: &Handle,
    inv_scale: &Handle,
    cast: Cast,
    orientation: Orientation,
) -> Result<(Option<Operand>, Option<Operand>), KernelError> {
    let x = check(client, x, orientation)?;
    for scale in [scale, inv_scale] {
        if scale.size_in_used() < 4 {
            return Err(KernelError::OutOfBounds { needed: 4, available: scale.size_in_used() });
        }
    }
    Ok(cast_copies(client, &x, scale, inv_scale, cast, orientation))
}

/// The view, if it and the copies are within reach of the kernels.
fn check<R: Runtime>(
    client: &ComputeClient<R>,
    x: &MatrixView,
    orientation: Orientation,
) -> Result<Checked, KernelError> {
    let strides = x.strides;
    let x = Checked::new(client, x)?;
    for (wanted, rows, k) in [(orientation.rows(), x.rows, x.cols), (orientation.cols(), x.cols, x.rows)] {
        if wanted && rows as u64 * row_words(k) as u64 > MAX_INDEX {
            return Err(KernelError::TooLarge { rows: x.rows, cols: x.cols, strides, limit: MAX_INDEX });
        }
    }
    Ok(x)
}

/// The copies by rows and by columns.
fn cast_copies<R: Runtime>(
    client: &ComputeClient<R>,
    x: &Checked,
    scale: &Handle,
    inv_scale: &Handle,
    cast: Cast,
    orientation: Orientation,
) -> (Option<Operand>, Option<Operand>) {
    // A column-major matrix is the transpose of a row-major one, and so are its two copies.
    let (rows, cols) = if x.is_column_major() {
        let (cols, rows) = launch_cast(client, &x.clone().transpose(), scale, cast.format, orientation.transposed());
        (rows, cols)
    } else {
        launch_cast(client, x, scale, cast.format, orientation)
    };
    let operand = |codes: Handle, rows, k| Operand {
        codes,
        inv_scale: inv_scale.clone(),
        rows,
        k,
        format: cast.format,
        granularity: cast.granularity,
    };
    (rows.map(|codes| operand(codes, x.rows, x.cols)), cols.map(|codes| operand(codes, x.cols, x.rows)))
}

/// Codes by rows and by columns.
fn launch_cast<R: Runtime>(
    client: &ComputeClient<R>,
    x: &Checked,
    scale: &Handle,
    format: Format,
    orientation: Orientation,
) -> (Option<Handle>, Option<Handle>) {
    let (row_pitch, col_pitch) = (row_words(x.cols), row_words(x.rows));
    let rows = orientation.rows().then(|| client.empty(x.rows * row_pitch * 4));
    let cols = orientation.cols().then(|| client.empty(x.cols * col_pitch * 4));
    let tiles_x = (x.cols as u32).div_ceil(TILE);
    let tiles_y = (x.rows as u32).div_ceil(TILE);
    // SAFETY: `x` is checked and `load_quad` reads only inside it; every store is guarded by the pitch and the number of
    // rows that the outputs were allocated with.
    unsafe {
        let words = |handle: &Option<Handle>, len| {
            ComptimeOptionArgs::from(handle.clone().map(|handle| ArrayArg::from_raw_parts(handle, len)))
        };
        cast_tiles::launch_unchecked::<R>(
            client,
            fold(client, tiles_x * tiles_y),
            CubeDim::new_1d(UNITS),
            x.load_words(),
            x.array(),
            ArrayArg::from_raw_parts(scale.clone(), 1),
            words(&rows, x.rows * row_pitch),
            words(&cols, x.cols * col_pitch),
            x.geometry(),
            row_pitch as u32,
            col_pitch as u32,
            x.source,
            format,
        );
    }
    (rows, cols)
}

// The outer `if let` is resolved while the kernel is generated, the inner `if` when it runs.
#[allow(clippy::collapsible_if)]
#[cube(launch_unchecked)]
fn cast_tiles<N: Size>(
    x: &Array<Vector<u32, N>>,
    scale: &Array<f32>,
    rows: &mut ComptimeOption<Array<u32>>,
    cols: &mut ComptimeOption<Array<u32>>,
    geometry: Geometry,
    row_pitch: u32,
    col_pitch: u32,
    #[comptime] source: Source,
    #[comptime] format: Format,
) {
    let (row0, col0) = tile_origin(geometry.cols, TILE);
    if row0 >= geometry.rows {
        terminate!();
    }
    let scale = scale[0];
    let unit_x = UNIT_POS % TILE_WORDS;
    let unit_y = UNIT_POS / TILE_WORDS;
    let col = col0 + unit_x * 4;

    // Byte i of along_cols[j] is byte j of the word of row i.
    let mut along_cols = Array::<u32>::new(4usize);
    #[unroll]
    for j in 0..4usize {
        along_cols[j] = 0u32;
    }
    #[unroll]
    for i in 0..4u32 {
        let row = row0 + unit_y * 4 + i;
        let raw = load_quad(x, &geometry, row, col, source);
        let mut word = 0u32.runtime();
        #[unroll]
        for j in 0..4u32 {
            let code = encode_scaled(widen(raw[j as usize], source), scale, format);
            // Padding is zero whatever the scale: a NaN scale would make it NaN.
            let inside = row < geometry.rows && col + j < geometry.cols;
            let code = select(inside, code, 0u32.runtime());
            word |= code << comptime!(8 * j);
            along_cols[j as usize] |= code << comptime!(8 * i);
        }
        #[comptime]
        if let ComptimeOption::Some(rows) = rows {
            if row < geometry.rows && col / 4 < row_pitch {
                rows[(row * row_pitch + col / 4) as usize] = word;
            }
        }
    }

    #[comptime]
    if let ComptimeOption::Some(cols) = cols {
        let mut stage = SharedMemory::<u32>::new(comptime!((TILE * STAGE_PITCH) as usize));
        #[unroll]
        for j in 0..4u32 {
            stage[((unit_x * 4 + j) * STAGE_PITCH + unit_y) as usize] = along_cols[j as usize];
        }
        sync_cube();
        #[unroll]
        for pass in 0..4u32 {
            let tile_col = pass * TILE_WORDS + unit_y;
            let col = col0 + tile_col;
            let word = row0 / 4 + unit_x;
            if col < geometry.cols && word < col_pitch {
                cols[(col * col_pitch + word) as usize] = stage[(tile_col * STAGE_PITCH + unit_x) as usize];
            }
        }
    }
}
