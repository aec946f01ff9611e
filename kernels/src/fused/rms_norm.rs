//! RMSNorm. Several units share a row and exchange partial sums.

use cubecl::ir::StorageType;
use cubecl::prelude::*;
use cubecl::server::Handle;

use super::{Dense, FusedKernel, gamma_of, wide};
use crate::grid::{EACH, MOST_CUBES, UNITS, cube_first, fold, lanes_sum};
use crate::ptx::cvt::Isa;
use crate::version::Version;
use crate::{KernelError, MatrixView};

/// Approximate number of rows of partial sums of dγ: enough cubes for any device, and memory for a
/// few hundred rows.
const MOST_PARTIAL: usize = 512;

/// Units per row, a power of two.
fn lanes(cols: usize) -> u32 {
    (cols.div_ceil(EACH) as u32).next_power_of_two().min(UNITS)
}

/// Rows that a cube processes at a time.
fn rows_per_cube(cols: usize) -> usize {
    (UNITS / lanes(cols)) as usize
}

/// Number of cubes for `rows` rows.
fn cubes(rows: usize, cols: usize, most: usize) -> usize {
    rows.div_ceil(rows_per_cube(cols)).min(most)
}

/// `y = x (1 / √(mean x² + ε)) γ` of each row of contiguous `x [rows, cols]`. γ `[1, cols]` is f32
/// or has x's dtype.
///
/// # Errors
/// As [`swiglu`](super::swiglu), and [`KernelError::ShapeMismatch`] for γ.
pub fn rms_norm<R: Runtime>(
    client: &ComputeClient<R>,
    x: &MatrixView,
    gamma: &MatrixView,
    epsilon: f32,
) -> Result<Handle, KernelError> {
    let (inputs, gamma, width) = checked(client, [x], gamma)?;
    let [rows, cols] = x.shape;
    let cubes = cubes(rows, cols, MOST_CUBES);
    let ([x], [x_base]) = inputs.args();
    let ([gamma_arg], [gamma_base]) = gamma.args();
    let (y, y_arg) = inputs.output(client);
    let (lanes, isa) = (lanes(cols), Isa::of(client));
    // SAFETY: the inputs are checked, and indices stay below the rows and their vectors.
    unsafe {
        rms_norm_forward::launch_unchecked::<R>(
            client,
            CubeCount::new_1d(cubes as u32),
            CubeDim::new_1d(UNITS),
            width,
            x,
            gamma_arg,
            y_arg,
            x_base,
            gamma_base,
            RowsLaunch::new(rows as u32, (cols / width) as u32, 1.0 / cols as f32, epsilon, lanes),
            isa,
            inputs.dtype,
            gamma.dtype,
            Version::of(client),
        );
    }
    Ok(y)
}

/// Gradients of x and γ from `dy`. The gradient of γ is f32 `[cols]`.
///
/// # Errors
/// As [`rms_norm`].
pub fn rms_norm_backward<R: Runtime>(
    client: &ComputeClient<R>,
    x: &MatrixView,
    gamma: &MatrixView,
    dy: &MatrixView,
    epsilon: f32,
) -> Result<[Handle; 2], KernelError> {
    let (inputs, gamma, width) = checked(client, [x, dy], gamma)?;
    let [rows, cols] = x.shape;
    let cubes = cubes(rows, cols, MOST_PARTIAL.div_ceil(rows_per_cube(cols)));
    let partials = cubes * rows_per_cube(cols);
    let partial = client.empty(partials * cols * 4);
    let dgamma = client.empty(cols * 4);
    let ([x, dy], [x_base, dy_base]) = inputs.args();
    let ([gamma_arg], [gamma_base]) = gamma.args();
    let (dx, dx_arg) = inputs.output(client);
    let (lanes, isa) = (lanes(cols), Isa::of(client));
    // SAFETY: as in forward. Each row of a cube has a row of `partial`; `sum_rows` reads all of
    // them and writes `cols` sums.
    unsafe {
        rms_norm_gradients::launch_unchecked::<R>(
            client,
            CubeCount::new_1d(cubes as u32),
            CubeDim::new_1d(UNITS),
            width,
            x,
            gamma_arg,
            dy,
            dx_arg,
            ArrayArg::from_raw_parts(partial.clone(), partials * cols / width),
            x_base,
            gamma_base,
            dy_base,
            RowsLaunch::new(rows as u32, (cols / width) as u32, 1.0 / cols as f32, epsilon, lanes),
            isa,
            inputs.dtype,
            gamma.dtype,
            Version::of(client),
        );
        sum_rows::launch_unchecked::<R>(
            client,
            fold(client, (cols as u32).div_ceil(SUM_COLS)),
            CubeDim::new_1d(UNITS),
            ArrayArg::from_raw_parts(partial, partials * cols),
            ArrayArg::from_raw_parts(dgamma.clone(), cols),
            partials as u32,
            cols as u32,
            Version::of(client),
        );
    }
    Ok([dx, dgamma])
}

/// Checks the inputs. Returns the tensors, γ, and the common vector width in elements.
fn checked<R: Runtime, const N: usize>(
    client: &ComputeClient<R>,
    tensors: [&MatrixView; N],
    gamma: &MatrixView,
) -> Result<(Dense<N>, Dense<1>, usize), KernelError> {
    let mut gamma = gamma_of(client, FusedKernel::RmsNorm, tensors[0], gamma)?;
    let mut tensors = Dense::new(client, FusedKernel::RmsNorm, tensors)?;
    let width = tensors.width.min(gamma.width);
    (tensors.width, gamma.width) = (width, width);
    Ok((tensors, gamma, width))
}

/// Shape and constants of a matrix in a kernel.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
struct Rows {
    rows: u32,
    /// Vectors in a row.
    vectors: u32,
    /// `1 / cols`. A division would be a function call, which uses local memory.
    per_element: f32,
    epsilon: f32,
    #[cube(comptime)]
    lanes: u32,
}

#[cube]
impl Rows {
    /// First row of this unit. It advances by [`step`](Self::step).
    fn first(&self) -> u32 {
        CUBE_POS as u32 * comptime!(UNITS / self.lanes) + UNIT_POS / self.lanes
    }

    fn step(&self) -> u32 {
        CUBE_COUNT as u32 * comptime!(UNITS / self.lanes)
    }

    /// Steps until all units of all cubes are past the last row. Equal in every unit, since they
    /// synchronize at barriers.
    fn steps(&self) -> u32 {
        self.rows.div_ceil(self.step())
    }

    /// `1 / √(mean x² + ε)` from a sum of squares.
    fn inverse_rms(&self, squares: f32) -> f32 {
        (squares * self.per_element + self.epsilon).inverse_sqrt()
    }

    /// Index of a row's first vector. Past the end, the last row's.
    fn first_vector(&self, row: u32) -> u32 {
        min(row, self.rows - 1) * self.vectors
    }

    /// [`inverse_rms`](Self::inverse_rms) of the row of x whose first vector is `first`.
    /// Synchronizes the cube: all units must call it.
    fn inverse<O: Float, N: Size>(&self, x: &Array<Vector<O, N>>, first: u32, #[comptime] isa: Isa) -> f32 {
        let lanes = comptime!(self.lanes);
        let mut squares = f32::new(0.0);
        let mut at = UNIT_POS % lanes;
        while at < self.vectors {
            let value = wide::<O, N>(x[(first + at) as usize]);
            squares += sum::<N>(value * value);
            at += lanes;
        }
        // Units may still read the previous row's sums.
        sync_cube();
        self.inverse_rms(lanes_sum(squares, lanes, isa))
    }
}

/// Sum of a vector's elements.
#[cube]
fn sum<N: Size>(values: Vector<f32, N>) -> f32 {
    let mut sum = values[0];
    let width = N::value();
    #[unroll]
    for i in 1..width {
        sum += values[i];
    }
    sum
}

#[cube(launch_unchecked)]
fn rms_norm_forward<O: Float, E: Float, N: Size>(
    x: &Array<Vector<O, N>>,
    gamma: &Array<Vector<E, N>>,
    y: &mut Array<Vector<O, N>>,
    x_base: u32,
    gamma_base: u32,
    of: Rows,
    #[comptime] isa: Isa,
    #[define(O)] _dtype: StorageType,
    #[define(E)] _gamma_dtype: StorageType,
    #[comptime] _version: Version,
) {
    let lanes = comptime!(of.lanes);
    let lane = UNIT_POS % lanes;
    let mut row = of.first();
    for _ in 0..of.steps() {
        let first = of.first_vector(row);
        let inverse = Vector::<f32, N>::new(of.inverse::<O, N>(x, x_base + first, isa));
        if row < of.rows {
            let mut at = lane;
            while at < of.vectors {
                let value = wide::<O, N>(x[(x_base + first + at) as usize]);
                let weight = wide::<E, N>(gamma[(gamma_base + at) as usize]);
                y[(first + at) as usize] = Vector::<O, N>::cast_from(value * inverse * weight);
                at += lanes;
            }
        }
        row += of.step();
    }
}

/// Each row of a cube has a row of `partial`. Only one unit reads and writes each element.
#[cube(launch_unchecked)]
fn rms_norm_gradients<O: Float, E: Float, N: Size>(
    x: &Array<Vector<O, N>>,
    gamma: &Array<Vector<E, N>>,
    dy: &Array<Vector<O, N>>,
    dx: &mut Array<Vector<O, N>>,
    partial: &mut Array<Vector<f32, N>>,
    x_base: u32,
    gamma_base: u32,
    dy_base: u32,
    of: Rows,
    #[comptime] isa: Isa,
    #[define(O)] _dtype: StorageType,
    #[define(E)] _gamma_dtype: StorageType,
    #[comptime] _version: Version,
) {
    let lanes = comptime!(of.lanes);
    let lane = UNIT_POS % lanes;
    let mut row = of.first();
    let sums = row * of.vectors;
    let mut at = lane;
    while at < of.vectors {
        partial[(sums + at) as usize] = Vector::<f32, N>::new(0.0f32);
        at += lanes;
    }
    for _ in 0..of.steps() {
        let first = min(row, of.rows - 1) * of.vectors;
        let mut squares = f32::new(0.0);
        let mut products = f32::new(0.0);
        let mut at = lane;
        while at < of.vectors {
            let value = wide::<O, N>(x[(x_base + first + at) as usize]);
            let weight = wide::<E, N>(gamma[(gamma_base + at) as usize]);
            let grad = wide::<O, N>(dy[(dy_base + first + at) as usize]) * weight;
            squares += sum::<N>(value * value);
            products += sum::<N>(grad * value);
            at += lanes;
        }
        sync_cube();
        let inverse = of.inverse_rms(lanes_sum(squares, lanes, isa));
        sync_cube();
        let mean = lanes_sum(products, lanes, isa) * inverse * of.per_element;
        let (inverse, mean) = (Vector::<f32, N>::new(inverse), Vector::<f32, N>::new(mean));
        if row < of.rows {
            let mut at = lane;
            while at < of.vectors {
                let normed = wide::<O, N>(x[(x_base + first + at) as usize]) * inverse;
                let weight = wide::<E, N>(gamma[(gamma_base + at) as usize]);
                let grad = wide::<O, N>(dy[(dy_base + first + at) as usize]);
                dx[(first + at) as usize] = Vector::<O, N>::cast_from((grad * weight - normed * mean) * inverse);
                partial[(sums + at) as usize] += grad * normed;
                at += lanes;
            }
        }
        row += of.step();
    }
}

/// Adjacent columns that a cube of [`sum_rows`] takes. Units of the same column share its rows.
const SUM_COLS: u32 = 32;

/// Rows that a unit has in flight.
const IN_FLIGHT: u32 = 4;

/// Sums the rows of a matrix, in a fixed order.
#[cube(launch_unchecked)]
fn sum_rows(matrix: &Array<f32>, sums: &mut Array<f32>, rows: u32, cols: u32, #[comptime] _version: Version) {
    let groups = comptime!(UNITS / SUM_COLS);
    let col0 = cube_first(SUM_COLS);
    if col0 >= cols {
        terminate!();
    }
    let col = col0 + UNIT_POS % SUM_COLS;
    let mut total = f32::new(0.0);
    let mut first = UNIT_POS / SUM_COLS;
    while first < rows {
        #[unroll]
        for i in 0..IN_FLIGHT {
            let row = first + comptime!(i * groups);
            let value = matrix[(min(row, rows - 1) * cols + min(col, cols - 1)) as usize];
            total += select(row < rows, value, f32::new(0.0));
        }
        first += comptime!(IN_FLIGHT * groups);
    }
    let mut shared = SharedMemory::<f32>::new(comptime!(UNITS as usize));
    shared[UNIT_POS as usize] = total;
    sync_cube();
    if UNIT_POS < SUM_COLS && col < cols {
        #[unroll]
        for i in 1..groups {
            total += shared[(UNIT_POS + comptime!(i * SUM_COLS)) as usize];
        }
        sums[col as usize] = total;
    }
}
