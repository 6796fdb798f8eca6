// Numbers of cuDNN's backend interface, as far as it is used: kinds of descriptors, attributes, types, modes. Tests compare each
// with cudnn.h where the toolkit is.
#pragma once

#include <cstdint>

namespace shardlab::gpu::cudnn {

/// cudnnBackendDescriptorType_t.
enum class Kind : int {
  kPointwise = 0,
  kEngine = 2,
  kEngineConfig = 3,
  kHeuristic = 4,
  kExecutionPlan = 5,
  kPointwiseOp = 13,
  kOperationGraph = 15,
  kVariantPack = 16,
  kTensor = 17,
  kMatmul = 18,
  kMatmulOp = 19,
  kReduction = 21,
  kReductionOp = 22,
  kReshapeOp = 31,
};

/// cudnnBackendAttributeName_t.
enum class Name : int {
  kPointwiseMode = 0,
  kPointwisePrecision = 1,
  kPointwiseAxis = 9,
  kHeuristicMode = 200,
  kHeuristicGraph = 201,
  kHeuristicResults = 202,
  kPlanHandle = 400,
  kPlanEngineConfig = 401,
  kPlanWorkspace = 402,
  kPointwiseDescriptor = 750,
  kPointwiseX = 751,
  kPointwiseB = 752,
  kPointwiseY = 753,
  kPointwiseT = 758,
  kGraphHandle = 800,
  kGraphOps = 801,
  kTensorAlignment = 900,
  kTensorType = 901,
  kTensorExtents = 902,
  kTensorStrides = 903,
  kTensorId = 906,
  kTensorVirtual = 907,
  kTensorByValue = 908,
  kPackIds = 1000,
  kPackPointers = 1001,
  kPackWorkspace = 1003,
  kMatmulPrecision = 1500,
  kMatmulA = 1520,
  kMatmulB = 1521,
  kMatmulC = 1522,
  kMatmulDescriptor = 1523,
  kReductionOperator = 1600,
  kReductionPrecision = 1601,
  kReductionX = 1610,
  kReductionY = 1611,
  kReductionDescriptor = 1612,
  kReshapeX = 2200,
  kReshapeY = 2201,
};

/// cudnnBackendAttributeType_t: of the elements of an attribute.
enum class Form : int {
  kHandle = 0,
  kDataType = 1,
  kBool = 2,
  kInt64 = 3,
  kPointer = 6,
  kHeuristicMode = 8,
  kPointwiseMode = 14,
  kDescriptor = 15,
  kReduction = 18,
};

/// cudnnDataType_t.
enum class DataType : int { kF32 = 0, kF16 = 2, kI32 = 4, kBF16 = 9, kBool = 11 };

/// cudnnPointwiseMode_t.
enum class Pointwise : int {
  kAdd = 0,
  kMul = 1,
  kDiv = 6,
  kSub = 9,
  kExp = 13,
  kLog = 15,
  kIdentity = 21,
  kGreaterOrEqual = 303,
  kIndex = 501,
  kSelect = 601,
};

/// cudnnReduceTensorOp_t.
enum class Reduce : int { kAdd = 0, kMax = 3 };

/// cudnnBackendHeurMode_t: cuDNN's best guess for the shape.
inline constexpr int kHeuristicModeA = 3;
/// Statuses from here to 3999: not supported.
inline constexpr int kNotSupported = 3000;

}  // namespace shardlab::gpu::cudnn
