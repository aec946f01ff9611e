//! Casts by rows only. With per-tensor scaling the cast is elementwise: units take consecutive
//! sectors of 32 bytes. With per-row scales, amax and cast are one launch, which keeps the row in
//! registers ([`RowSplit`]).

use cubecl::prelude::*;

use super::encode::{Encoding, encode_sector, lanes_scale};
use super::tensor::{TensorScale, TensorScaleLaunch};
use super::tile::store_words;
use super::{Copies, array, words};
use crate::amax::{amax_bits, largest_magnitude};
use crate::grid::{UNITS, cube_first, fold, is_cpu, lanes_max};
use crate::load::{Cursor, Geometry, SECTOR_WORDS, all_loaded, load_sector};
use crate::scale::inverse_bits;
use crate::version::Version;
use crate::view::Checked;
use crate::{Orientation, row_words};

/// Sectors that a unit has in flight, 128 bytes of `x`, if it does not keep a row.
const SECTORS: u32 = 4;

/// Sectors of a row, padded like a row of codes.
fn sectors_per_row(x: &Checked) -> usize {
    row_words(x.cols) * 4 / x.element_type.sector_len() as usize
}

/// Number of cubes of [`launch_linear`].
pub(super) fn linear_cubes(x: &Checked) -> usize {
    (x.rows * sectors_per_row(x)).div_ceil((UNITS * SECTORS) as usize)
}

/// Launches the cast with one scale into the copy by rows.
pub(super) fn launch_linear<R: Runtime>(
    client: &ComputeClient<R>,
    x: &Checked,
    encoding: Encoding,
    scale: TensorScaleLaunch<R>,
    copies: Copies,
) -> Copies {
    let cubes = linear_cubes(x);
    // If rows of codes have no padding, they are contiguous like rows of a dense `x`.
    let dense = x.clone().flatten();
    let x = if x.cols == row_words(x.cols) * 4 { &dense } else { x };
    let per_row = sectors_per_row(x);
    // SAFETY: `x` is checked and `load_sector` reads only inside it. The copy has room for every
    // sector's codes, and stores are guarded by the number of sectors. Cube `i` writes word `i` of
    // `observed`.
    unsafe {
        cast_linear::launch_unchecked::<R>(
            client,
            fold(client, cubes as u32),
            CubeDim::new_1d(UNITS),
            x.vector_words(),
            (x.element_type.sector_len() / 4) as usize,
            x.array(),
            scale,
            array(&copies.rows.as_ref().expect("the copy by rows").codes),
            x.geometry(),
            (x.rows * per_row) as u32,
            per_row as u32,
            x.rows == 1,
            encoding,
            Version::of(client),
        );
    }
    copies
}

/// Sector `i` of `x` becomes vector `i` of the codes.
#[cube(launch_unchecked)]
fn cast_linear<N: Size, M: Size>(
    x: &Array<Vector<u32, N>>,
    scale: &mut TensorScale,
    codes: &mut Array<Vector<u32, M>>,
    geometry: Geometry,
    sectors: u32,
    per_row: u32,
    #[comptime] one_row: bool,
    #[comptime] encoding: Encoding,
    #[comptime] _version: Version,
) {
    let Encoding { element_type, isa, .. } = comptime!(encoding);
    let cube_first = CUBE_POS as u32 * comptime!(UNITS * SECTORS);
    if cube_first >= sectors {
        terminate!();
    }
    let first = cube_first + UNIT_POS;
    let mut raw = Array::<u32>::new(comptime!((SECTORS * SECTOR_WORDS) as usize));
    let mut cols = Array::<u32>::new(comptime!(SECTORS as usize));
    let mut at = Cursor::new(first, UNITS, per_row, one_row);
    #[unroll]
    for i in 0..SECTORS {
        let col = at.piece * comptime!(element_type.sector_len());
        cols[i as usize] = col;
        load_sector(x, &geometry, at.row, col, &mut raw, comptime!(i * SECTOR_WORDS), element_type, isa);
        at.advance();
    }
    all_loaded(isa);
    let largest = scale.largest(&raw, comptime!(SECTORS * SECTOR_WORDS), element_type);
    let scales = scale.make(encoding);
    #[unroll]
    for i in 0..SECTORS {
        let words =
            encode_sector(&raw, comptime!(i * SECTOR_WORDS), &scales, cols[i as usize], geometry.cols, encoding);
        let to = first + comptime!(i * UNITS);
        if to < sectors {
            store_words(codes, to, &words, 0u32);
        }
    }
    scale.observe(largest, isa);
}

/// Units that share a row, and sectors of 32 bytes that each keeps in registers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct RowSplit {
    /// Units per row, a power of two. A cube takes `UNITS / lanes` rows.
    lanes: u32,
    /// Sectors per unit. Zero for rows that are too long to keep, which the cube reads twice.
    held: u32,
}

impl RowSplit {
    /// Split of a row of `sectors` sectors. Uses the fewest units with at most four sectors each,
    /// so that few units wait for each other and four cubes fit on an SM. If that exceeds a cube,
    /// each unit keeps more, up to [`MOST_HELD`].
    ///
    /// On a CPU it uses the fewest units with at most [`MOST_HELD`] sectors each, because a maximum
    /// over fewer units is faster.
    fn new(sectors: usize, cpu: bool) -> Self {
        let sectors = sectors as u32;
        let each = if cpu { MOST_HELD } else { 4 };
        let lanes = sectors.div_ceil(each).next_power_of_two().clamp(4, UNITS);
        let held = sectors.div_ceil(lanes);
        RowSplit { lanes, held: if held <= MOST_HELD { held } else { 0 } }
    }
}

/// Maximum sectors that a unit keeps in registers.
const MOST_HELD: u32 = 8;

/// Launches the cast with per-row scales.
pub(super) fn launch<R: Runtime>(client: &ComputeClient<R>, x: &Checked, encoding: Encoding) -> Copies {
    let per_row = sectors_per_row(x);
    let split = RowSplit::new(per_row, is_cpu(client));
    let copies = Copies::new(client, x, Orientation::Rows, |_| (words(client, x.rows), words(client, x.rows)));
    let copy = copies.rows.as_ref().expect("the copy by rows");
    // SAFETY: `x` is checked and `load_sector` reads only inside it. Stores are guarded by the rows
    // and the sectors of a row, whose codes fill the pitch.
    unsafe {
        cast_rows::launch_unchecked::<R>(
            client,
            fold(client, (x.rows as u32).div_ceil(UNITS / split.lanes)),
            CubeDim::new_1d(UNITS),
            x.vector_words(),
            (x.element_type.sector_len() / 4) as usize,
            x.array(),
            array(&copy.codes),
            array(&copy.amax),
            array(&copy.inv_scale),
            x.geometry(),
            per_row as u32,
            encoding,
            split,
            Version::of(client),
        );
    }
    copies
}

#[cube(launch_unchecked)]
fn cast_rows<N: Size, M: Size>(
    x: &Array<Vector<u32, N>>,
    codes: &mut Array<Vector<u32, M>>,
    amax: &mut Array<u32>,
    inv_scales: &mut Array<u32>,
    geometry: Geometry,
    per_row: u32,
    #[comptime] encoding: Encoding,
    #[comptime] split: RowSplit,
    #[comptime] _version: Version,
) {
    let element_type = comptime!(encoding.element_type);
    let lanes = comptime!(split.lanes);
    let kept = comptime!(split.held > 0);
    let held = comptime!(if kept { split.held } else { SECTORS });
    let rows_per_cube = comptime!(UNITS / split.lanes);
    let row0 = cube_first(rows_per_cube);
    if row0 >= geometry.rows {
        terminate!();
    }
    let lane = UNIT_POS % lanes;
    let row = row0 + UNIT_POS / lanes;

    let mut raw = Array::<u32>::new(comptime!((held * SECTOR_WORDS) as usize));
    let mut largest = 0u32.runtime();
    let mut sectors = Sectors { geometry, row, first: lane, per_row, held, lanes, encoding };
    if comptime!(kept) {
        sectors.load(x, &mut raw);
        largest = largest_magnitude(largest, &raw, 0u32, comptime!(held * SECTOR_WORDS), element_type);
    } else {
        while sectors.first - lane < per_row {
            sectors.load(x, &mut raw);
            largest = largest_magnitude(largest, &raw, 0u32, comptime!(held * SECTOR_WORDS), element_type);
            sectors.first += comptime!(held * lanes);
        }
    }
    let bits = amax_bits(lanes_max(largest, lanes, encoding.isa), element_type);
    let multiplier = lanes_scale(bits, lanes, encoding);
    let mut scales = Array::<f32>::new(1usize);
    scales[0] = f32::reinterpret(multiplier);
    if lane == 0 && row < geometry.rows {
        amax[row as usize] = bits;
        inv_scales[row as usize] = inverse_bits(multiplier, encoding.isa);
    }

    if comptime!(kept) {
        sectors.store(codes, &raw, &scales);
    } else {
        sectors.first = lane;
        while sectors.first - lane < per_row {
            sectors.load(x, &mut raw);
            sectors.store(codes, &raw, &scales);
            sectors.first += comptime!(held * lanes);
        }
    }
}

/// Sectors `first`, `first + lanes`, ... of a row; `held` in total.
#[derive(CubeType)]
struct Sectors {
    geometry: Geometry,
    row: u32,
    first: u32,
    per_row: u32,
    #[cube(comptime)]
    held: u32,
    #[cube(comptime)]
    lanes: u32,
    #[cube(comptime)]
    encoding: Encoding,
}

#[cube]
impl Sectors {
    /// Loads the sectors one after another into `raw`.
    fn load<N: Size>(&self, x: &Array<Vector<u32, N>>, raw: &mut Array<u32>) {
        let Encoding { element_type, isa, .. } = comptime!(self.encoding);
        #[unroll]
        for i in 0..self.held {
            let col = (self.first + comptime!(i * self.lanes)) * comptime!(element_type.sector_len());
            load_sector(x, &self.geometry, self.row, col, raw, comptime!(i * SECTOR_WORDS), element_type, isa);
        }
        all_loaded(isa);
    }

    /// Casts the loaded sectors and stores their codes.
    fn store<M: Size>(&self, codes: &mut Array<Vector<u32, M>>, raw: &Array<u32>, scales: &Array<f32>) {
        let encoding = comptime!(self.encoding);
        #[unroll]
        for i in 0..self.held {
            let sector = self.first + comptime!(i * self.lanes);
            let col = sector * comptime!(encoding.element_type.sector_len());
            let words = encode_sector(raw, comptime!(i * SECTOR_WORDS), scales, col, self.geometry.cols, encoding);
            if self.row < self.geometry.rows && sector < self.per_row {
                store_words(codes, self.row * self.per_row + sector, &words, 0u32);
            }
        }
    }
}
