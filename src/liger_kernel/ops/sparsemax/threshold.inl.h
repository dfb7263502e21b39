// The search for tau, without sorting; textually included by cpu.isa.cpp and kernels.cuh, with LIGER_ROW_FUNCTION as they need it.
//
// z = x - max x lies in (-inf, 0]. For every non-empty set A of elements, (sum of z over A - 1) / |A| <= tau, with equality for the
// support; and A = {z > t} with t = tau is the support. So t <- (sum over {z > t} - 1) / |{z > t}| from t = -1 rises to tau in finitely
// many steps and stops there (Michelot 1986; Newton's method on a convex piecewise linear function): with the very quotient that
// sorting arrives at. Normal rows of scale 1 and more take 4 to 8 passes, supports of 10^5 elements up to 15. No better bound than one
// element a pass is known, so after kPatience passes every other one halves what is left between the lower and an upper bound.
struct Threshold {
  static constexpr int kPatience = 16;

  float t = -1;  // where the next pass looks: the sum and the number of z > t are wanted
  float lower = -1, upper = 0;
  int passes = 0;
  bool bisect = false;

  // Whether another pass is wanted; when not, `lower` is tau.
  LIGER_ROW_FUNCTION bool next(float sum, float count) {
    const float better = (sum - 1) / count;
    if (sum - count * t < 1) upper = t < upper ? t : upper;  // t > tau
    if (!bisect && !(better > lower)) return false;
    lower = better > lower ? better : lower;
    const float middle = 0.5f * (lower + upper);
    bisect = ++passes > kPatience && !bisect && lower < middle && middle < upper;
    t = bisect ? middle : lower;
    return true;
  }
};
